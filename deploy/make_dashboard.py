"""Write the dashboard for Grafana: `python deploy/make_dashboard.py`.

Its queries use the names of vLLM's metrics, so it shows servers of vLLM as well.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "grafana" / "dashboards" / "nanoserve.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
MODEL = '{model_name=~"$model_name"}'
WIDTH, HEIGHT = 8, 8  # of a panel; a row of the grid is 24 wide

# By row: the title of a panel, its unit, and its queries by legend.
Queries = dict[str, str]


def quantiles(metric: str) -> Queries:
    """Return queries for the usual quantiles of a histogram."""
    rates = f"sum by (le) (rate(vllm:{metric}_bucket{MODEL}[$__rate_interval]))"
    return {
        f"p{100 * quantile:g}": f"histogram_quantile({quantile:g}, {rates})"
        for quantile in (0.5, 0.95, 0.99)
    }


def rate(metric: str, by: str = "") -> str:
    """Return a query for the increase of a counter per second, added up over all but `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate(vllm:{metric}{MODEL}[$__rate_interval]))"


def ratio(part: str, whole: str) -> str:
    """Return a query for the ratio of two counters."""
    return f"{rate(part)} / {rate(whole)}"


def gauge(metric: str) -> str:
    """Return a query for a gauge, added up over engines."""
    return f"sum (vllm:{metric}{MODEL})"


ROWS: dict[str, list[tuple[str, str, Queries]]] = {
    "Latency": [
        ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        ("Time between two tokens", "s", quantiles("inter_token_latency_seconds")),
        ("Whole request", "s", quantiles("e2e_request_latency_seconds")),
        ("In the queue", "s", quantiles("request_queue_time_seconds")),
        ("Prefill", "s", quantiles("request_prefill_time_seconds")),
        ("Decode", "s", quantiles("request_decode_time_seconds")),
    ],
    "Throughput": [
        (
            "Tokens per second",
            "short",
            {"prompt": rate("prompt_tokens_total"), "output": rate("generation_tokens_total")},
        ),
        (
            "Completions per second, by how they ended",
            "reqps",
            {"{{finished_reason}}": rate("request_success_total", "finished_reason")},
        ),
        ("Tokens in a step", "short", quantiles("iteration_tokens_total")),
    ],
    "Scheduler and KV cache": [
        (
            "Sequences",
            "short",
            {"running": gauge("num_requests_running"), "waiting": gauge("num_requests_waiting")},
        ),
        (
            "KV blocks in use",
            "percentunit",
            {"engine {{engine}}": f"vllm:kv_cache_usage_perc{MODEL}"},
        ),
        (
            "Prompt tokens found in the prefix cache",
            "percentunit",
            {"hits": ratio("prefix_cache_hits_total", "prefix_cache_queries_total")},
        ),
        ("Preemptions per second", "short", {"preemptions": rate("num_preemptions_total")}),
        (
            "Draft tokens accepted",
            "percentunit",
            {
                "accepted": ratio(
                    "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"
                )
            },
        ),
    ],
    "Requests": [
        ("Tokens of a prompt", "short", quantiles("request_prompt_tokens")),
        ("Tokens of an output", "short", quantiles("request_generation_tokens")),
        ("max_tokens of a request", "short", quantiles("request_params_max_tokens")),
    ],
    "Process": [
        ("Memory", "bytes", {"resident": "process_resident_memory_bytes"}),
        (
            "CPU cores in use",
            "short",
            {"cores": "rate(process_cpu_seconds_total[$__rate_interval])"},
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard, in Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, described in ROWS.items():
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append({"type": "row", "title": row, "collapsed": False, "gridPos": place})
        for number, (title, unit, queries) in enumerate(described):
            y, x = top + 1 + HEIGHT * (number // 3), WIDTH * (number % 3)
            panels.append(_panel(title, unit, queries) | {
                "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT}
            })  # fmt: skip
        top += 1 + HEIGHT * -(-len(described) // 3)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "title": "nanoserve",
        "uid": "nanoserve",
        "schemaVersion": 41,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source(), _models()]},
        "panels": panels,
    }


def _panel(title: str, unit: str, queries: Queries) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": query,
            "legendFormat": legend,
        }
        for number, (legend, query) in enumerate(queries.items())
    ]
    return {
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}},
        "targets": targets,
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _models() -> dict[str, Any]:
    query = "label_values(vllm:cache_config_info, model_name)"
    return {
        "name": "model_name",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "models"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
