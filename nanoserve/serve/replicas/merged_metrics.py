"""Metrics of several replicas, merged into one text in Prometheus' format."""

from collections.abc import Mapping


def merged(expositions: Mapping[int, bytes]) -> bytes:
    """Merge the metrics of replicas, by replica number. Each sample gets a label `replica`.

    Samples of one name are grouped under its HELP and TYPE lines, as Prometheus requires.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in sorted(expositions.items()):
        name = ""
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                head = heads[name] = []
                samples.setdefault(name, [])
            if line.startswith("#"):
                head.append(line)
            else:
                samples[name].append(_labelled(line, number))
    lines = [line for name, head in heads.items() for line in (*head, *samples[name])]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(sample: str, number: int) -> str:
    """Add the label `replica` to a sample: `name{a="b"} 1` or `name 1`.

    A name contains neither a brace nor a space.
    """
    name, brace, rest = sample.partition("{")
    if not brace or " " in name:
        name, _, value = sample.partition(" ")
        return f'{name}{{replica="{number}"}} {value}'
    return f'{name}{{replica="{number}",{rest}'
