// Server-sent events from the body of a response. (`EventSource` can neither POST nor send a key.)

// Parser for text in pieces of any length. Lines end with "\n", "\r\n" or "\r".
export class EventParser {
  #rest = "";
  #name = "";
  #data = [];

  // Return the events that `text` completes, each {name, data}.
  *feed(text) {
    // The rest of the previous text contains no line end, but may end with the first half of one.
    const lineEnd = /\r\n|\n|\r(?!$)/g;
    lineEnd.lastIndex = Math.max(0, this.#rest.length - 1);
    const all = this.#rest + text;
    let start = 0;
    for (let found = lineEnd.exec(all); found; found = lineEnd.exec(all)) {
      const event = this.#line(all.slice(start, found.index));
      start = lineEnd.lastIndex;
      if (event) yield event;
    }
    this.#rest = all.slice(start);
  }

  #line(line) {
    if (line === "") {
      const event = this.#data.length ? { name: this.#name || "message", data: this.#data.join("\n") } : null;
      this.#name = "";
      this.#data = [];
      return event;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return null; // a comment
    const field = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (field === "data") this.#data.push(value);
    if (field === "event") this.#name = value;
    return null;
  }
}

// Bytes may be split within a character: the decoder keeps its first bytes for the next piece.
export async function* eventsOf(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {}); // ends the request when the caller stops reading
  }
}
