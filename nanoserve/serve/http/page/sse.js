// Server-sent events, out of the body of a response. (`EventSource` can neither POST nor send a key.)

// Takes the text in any pieces. Its lines end with "\n", "\r\n" or "\r".
export class EventParser {
  #rest = "";
  #name = "";
  #data = [];

  // The events that `text` completes, each {name, data}.
  *feed(text) {
    // What is left from before has no line end in it, but may end with half of one.
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

// A stream of bytes may be cut within a character: the decoder waits for the rest of it.
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
    reader.cancel().catch(() => {}); // whoever stops reading ends the request
  }
}
