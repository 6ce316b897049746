// Text as a code block of Markdown. The fence is longer than any run of backticks in the text.

export function fenced(text, language = "") {
  const runs = text.match(/`+/g) ?? [];
  const fence = "`".repeat(1 + runs.reduce((most, run) => Math.max(most, run.length), 2));
  return `${fence}${language}\n${text}\n${fence}`;
}
