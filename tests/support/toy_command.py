"""A command of one's own."""


def main(arguments: list[str]) -> int:
    print("hello", *arguments)
    return len(arguments)
