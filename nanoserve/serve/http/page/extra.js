// Additional fields of a request, as JSON: for example {"min_tokens": 20, "logit_bias": {"5": -10}}.

const OWN = ["model", "messages", "stream", "stream_options", "continue_final_message", "add_generation_prompt"];
const NOT_SHOWN = ["n", "tools", "tool_choice", "functions", "function_call"];

// Return {fields, wrong}: the fields, or a description of the error. `isSet` returns true for a field
// that is set elsewhere.
export function extraIn(text, isSet = () => false) {
  if (!text.trim()) return { fields: {}, wrong: "" };
  const refused = (wrong) => ({ fields: {}, wrong });
  let fields;
  try {
    fields = JSON.parse(text.trim());
  } catch (error) {
    return refused(`This is not JSON: ${error.message.replace(/\.$/, "")}.`);
  }
  if (!(fields instanceof Object) || Array.isArray(fields)) {
    return refused('This must be a JSON object, like {"min_tokens": 20}.');
  }
  for (const name of Object.keys(fields)) {
    if (OWN.includes(name)) return refused(`The page itself sets ${name}.`);
    if (NOT_SHOWN.includes(name)) return refused(`The page cannot show what ${name} brings; use the API.`);
    if (isSet(name)) return refused(`${name} is set above, too. Set it once.`);
  }
  return { fields, wrong: "" };
}
