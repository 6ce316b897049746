// JSON that people paste and models write.

const DEEPEST = 40; // levels that are indented: what is nested deeper would be mostly spaces
const TOKEN = /"[^"\\]*(?:\\.[^"\\]*)*"|[{}[\],:]|[^\s{}[\],:"]+/g;
const OPENING = new Set(["{", "["]);
const CLOSING = new Set(["}", "]"]);

// {schema, wrong}: the JSON object that `text` is, or else what is wrong with it, in words.
export function schemaIn(text) {
  let value;
  try {
    value = JSON.parse(text.trim()); // which takes away what comes along when one copies: odd spaces
  } catch (error) {
    return { schema: null, wrong: `This is no JSON: ${error.message.replace(/\.$/, "")}.` };
  }
  if (value instanceof Object && !Array.isArray(value)) return { schema: value, wrong: "" };
  const kind = Array.isArray(value) ? "a list" : value === null ? "null" : `a ${typeof value}`;
  return { schema: null, wrong: `A schema is a JSON object, {…}, and this is ${kind}.` };
}

// The same JSON, one value a line. Its values are left as they are written: parsed and written anew,
// a number of twenty digits would be another one, and a key that came twice would be there once.
// Text that is no JSON, or not all of it, comes back as it is.
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
