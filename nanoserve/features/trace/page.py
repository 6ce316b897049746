"""A trace as one HTML page: it needs no server, no network and no other file.

Markup, style and program are `page.html`, `page.css` and `page.js` beside this file. The program
rebuilds the state of any step from the trace's own records, which are embedded in the page.
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
    """The page, to be written as UTF-8."""
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
    # In one pass: what is filled in may itself look like a gap.
    return re.sub(r"\{\{(\w+)\}\}", lambda gap: parts[gap[1]], _resource("page.html"))


def embed(data: Any) -> str:
    """JSON for the inside of a `<script>`, which would end at a `</script>` in a text.

    The escape is JSON's own, so that it reads back as it was. So is the one of half a surrogate
    pair, which UTF-8 cannot write.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _resource(name: str) -> str:
    return files("nanoserve.features.trace").joinpath(name).read_text(encoding="utf-8")
