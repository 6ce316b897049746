// JSON from users and from models.

const DEEPEST = 40; // indented levels: deeper ones would consist mostly of spaces
const TOKEN = /"[^"\\]*(?:\\.[^"\\]*)*"|[{}[\],:]|[^\s{}[\],:"]+/g;
const OPENING = new Set(["{", "["]);
const CLOSING = new Set(["}", "]"]);

// Return {schema, wrong}: the JSON object in `text`, or else a description of the error.
export function schemaIn(text) {
  let value;
  try {
    value = JSON.parse(text.trim()); // `trim` also removes special spaces of copied text
  } catch (error) {
    return { schema: null, wrong: `This is not JSON: ${error.message.replace(/\.$/, "")}.` };
  }
  if (value instanceof Object && !Array.isArray(value)) return { schema: value, wrong: "" };
  const kind = Array.isArray(value) ? "a list" : value === null ? "null" : `a ${typeof value}`;
  return { schema: null, wrong: `A schema must be a JSON object, {…}, and this is ${kind}.` };
}

// Return the same JSON with one value per line. Values are not parsed and encoded again, which would
// change a number of twenty digits and drop a repeated key. Text that is not JSON, or incomplete, is
// returned unchanged.
export function setOut(text) {
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  let [shown, depth, before] = ["", 0, ""];
  const newLine = () => `\n${"  ".repeat(Math.min(depth, DEEPEST))}`;
  for (const [token] of text.matchAll(TOKEN)) {
    if (CLOSING.has(token)) {
      depth--;
      if (!OPENING.has(before)) shown += newLine();
    } else if (OPENING.has(before) || before === ",") {
      shown += newLine();
    }
    shown += token === ":" ? ": " : token;
    if (OPENING.has(token)) depth++;
    before = token;
  }
  return shown;
}
