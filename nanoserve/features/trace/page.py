"""Convert a trace to one HTML page, which needs no server, no network and no other file.

Its markup, style and script are `page.html`, `page.css` and `page.js` in this folder. The script
reconstructs the state of any step from the records of the trace, which are embedded in the page.
"""

import html
import json
import re
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from nanoserve.features.trace.phases import chrome_trace, phases
from nanoserve.features.trace.reader import Trace


def make_page(trace: Trace) -> str:
    """Return the page as a string, to be written as UTF-8."""
    data = {
        "header": trace.header,
        "steps": trace.steps,
        "closed": trace.closed,
        "cut_off_line": trace.cut_off_line,
        "phases": {seq: [asdict(span) for span in spans] for seq, spans in phases(trace).items()},
        "chrome": chrome_trace(trace),
    }
    parts = {
        "title": html.escape(str(trace.header["model"])),
        "css": _resource("page.css"),
        "js": _resource("page.js"),
        "data": embed(data),
    }
    # In one pass, because the inserted text may itself contain a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda gap: parts[gap[1]], _resource("page.html"))


def embed(data: Any) -> str:
    """Return JSON for the inside of a `<script>`, which a `</script>` in a string would end.

    "<" is escaped as JSON allows, so that the data is unchanged when it is read. A lone surrogate,
    which UTF-8 cannot encode, is escaped in the same way.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _resource(name: str) -> str:
    return files("nanoserve.features.trace").joinpath(name).read_text(encoding="utf-8")
