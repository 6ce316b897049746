// Colours for code: comments, strings, numbers, keywords and names that are called. One pass with a
// regular expression for each kind of token, without backtracking over more than a token, so the time
// is linear in the length. A language that is not known stays as it is.

import { element } from "./element.js";

const LONGEST = 30_000; // characters; longer code stays plain, as each token is a node

const words = (text) => new Set(text.split(" "));
const JS = "as async await break case catch class const continue debugger default delete do else enum export extends false finally for from function if implements import in instanceof interface let new null of return static super switch this throw true try type typeof undefined var void while yield";
const C = "alignas auto bool break case catch char class const constexpr continue default delete do double else enum explicit extern false final float for friend goto if include define ifdef ifndef endif inline int long mutable namespace new noexcept nullptr operator override private protected public return short signed sizeof static struct switch template this throw true try typedef typename union unsigned using virtual void volatile while __global__ __device__ __shared__";
const JAVA = "abstract boolean break byte case catch char class const continue default do double else enum extends false final finally float for fun if implements import in instanceof int interface is long namespace new null object override package private protected public return short static string super switch this throw throws true try using val var virtual void when while";
const GO = "break case chan const continue default defer else fallthrough false for func go goto if import interface map nil package range return select struct switch true type var";
const RUST = "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while";
const PYTHON = "and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return self True try while with yield";
const SHELL = "case do done elif else esac export fi for function if in local return select set then unset until while";
const SQL = "add all alter and as asc begin between by case check commit create cross delete desc distinct drop else end exists false from full group having if in index inner insert into is join key left like limit not null offset on or order outer primary references returning right rollback select set table then true union unique update values view when where with";

// Parts of the grammars, for sticky regular expressions. A text or comment without an end goes on.
const SLASHES = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
const HASH = String.raw`#[^\n]*`;
const QUOTED = String.raw`"(?:[^"\\\n]|\\[\s\S])*"?|'(?:[^'\\\n]|\\[\s\S])*'?`;
const BACKTICKS = "`(?:[^`\\\\]|\\\\[\\s\\S])*`?";
const TRIPLE = String.raw`[a-zA-Z]{0,2}"""[\s\S]*?(?:"""|$)|[a-zA-Z]{0,2}'''[\s\S]*?(?:'''|$)`;

const grammar = (comment, string, keywords, options = {}) => ({ comment, string, keywords: words(keywords), ...options });
const GRAMMARS = {
  python: grammar(HASH, `${TRIPLE}|[a-zA-Z]{0,2}(?:${QUOTED})`, PYTHON),
  javascript: grammar(SLASHES, `${QUOTED}|${BACKTICKS}`, JS),
  c: grammar(SLASHES, QUOTED, C),
  java: grammar(SLASHES, QUOTED, JAVA),
  go: grammar(SLASHES, `${QUOTED}|${BACKTICKS}`, GO),
  rust: grammar(SLASHES, String.raw`"(?:[^"\\]|\\[\s\S])*"?|'(?:[^'\\\n]|\\.)'`, RUST), // not 'a of a lifetime
  bash: grammar(String.raw`(?<![^\s;])#[^\n]*`, String.raw`"(?:[^"\\]|\\[\s\S])*"?|'[^']*'?|\$\w+|\$\{[^}\n]*\}?`, SHELL),
  sql: grammar(String.raw`--[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`, QUOTED, SQL, { ignoresCase: true }),
  json: grammar(SLASHES, String.raw`"(?:[^"\\\n]|\\.)*"?`, "true false null"),
  yaml: grammar(String.raw`(?<![^\s])#[^\n]*`, String.raw`(?<!\w)(?:${QUOTED})`, "true false null yes no on off"),
  css: grammar(String.raw`\/\*[\s\S]*?(?:\*\/|$)`, QUOTED, "important media supports import from to"),
  html: grammar(String.raw`<!--[\s\S]*?(?:-->|$)`, `(?<==)(?:${QUOTED})`, "", { keyword: String.raw`<[\/!?]?[\w:-]+|\/?>` }),
};
const NAMES = {
  py: "python", python3: "python", pycon: "python", js: "javascript", jsx: "javascript", ts: "javascript",
  tsx: "javascript", typescript: "javascript", mjs: "javascript", cpp: "c", "c++": "c", h: "c", cc: "c", hpp: "c",
  cuda: "c", cu: "c", kotlin: "java", cs: "java", csharp: "java", "c#": "java", scala: "java", swift: "java",
  golang: "go", rs: "rust", sh: "bash", shell: "bash", zsh: "bash", console: "bash", jsonc: "json", jsonl: "json",
  yml: "yaml", toml: "yaml", ini: "yaml", xml: "html", svg: "html", vue: "html", scss: "css", less: "css",
};

const patterns = new Map(); // compiled when a language is first used

function patternOf(name) {
  if (!patterns.has(name)) {
    const { comment, string, keyword = "(?!)" } = GRAMMARS[name];
    const number = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*\.?[\d_]*(?:[eE][+-]?\d+)?)[a-zA-Z\d]*`;
    const source = `(?<comment>${comment})|(?<string>${string})|(?<keyword>${keyword})|(?<number>${number})|(?<word>[\\p{L}_$][\\p{L}\\p{N}_$]*)`;
    patterns.set(name, new RegExp(source, "gu"));
  }
  return patterns.get(name);
}

// Return nodes and strings that together have the text of `code`.
export function coloured(code, language) {
  const wanted = language.toLowerCase();
  const name = NAMES[wanted] ?? wanted;
  if (code.length > LONGEST) return [code];
  if (name === "diff" || name === "patch") return diff(code);
  return Object.hasOwn(GRAMMARS, name) ? tokens(code, name) : [code];
}

function tokens(code, name) {
  const { keywords, ignoresCase } = GRAMMARS[name];
  const made = [];
  let from = 0;
  for (const { 0: text, index, groups } of code.matchAll(patternOf(name))) {
    const end = index + text.length;
    let kind = ["comment", "string", "keyword", "number"].find((one) => groups[one] !== undefined);
    if (!kind && keywords.has(ignoresCase ? text.toLowerCase() : text)) kind = "keyword";
    if (!kind && code[end] === "(") kind = "name";
    if (!kind) continue;
    if (index > from) made.push(code.slice(from, index));
    made.push(element("span", { class: kind }, text));
    from = end;
  }
  return from < code.length ? [...made, code.slice(from)] : made;
}

function diff(code) {
  const kinds = { "+": "added", "-": "removed", "@": "comment" };
  return code.split(/(?<=\n)/).map((line) => (kinds[line[0]] ? element("span", { class: kinds[line[0]] }, line) : line));
}
