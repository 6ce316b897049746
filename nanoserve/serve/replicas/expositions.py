"""What several engines tell Prometheus, as one text."""

from collections.abc import Mapping


def merged(told: Mapping[int, bytes]) -> bytes:
    """The expositions of replicas, by number: each sample gets the label `replica`.

    Samples of one name stand together, under its HELP and TYPE, as Prometheus wants them.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in sorted(told.items()):
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
    """`name{a="b"} 1` or `name 1`. A name has neither brace nor space."""
    name, brace, rest = sample.partition("{")
    if not brace or " " in name:
        name, _, value = sample.partition(" ")
        return f'{name}{{replica="{number}"}} {value}'
    return f'{name}{{replica="{number}",{rest}'
