"""Accept flags of vLLM's server without effect, or reject them with an alternative."""

import logging
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from typing import Any

from nanoserve.cli.parser import json_or_text
from nanoserve.compat.server_flags import FLAGS
from nanoserve.utils.checks import shown

logger = logging.getLogger(__name__)

# Flags that may be given without a value.
_SWITCHES = {
    *("trust_request_mm_kwargs",),
    *("exclude_tools_when_tool_choice_none", "cohere_is_reasoning_model", "log_error_stack"),
    *("headless", "grpc"),
}
_SHORT = {"api_server_count": ["-asc"]}


def add_server_flags(parser: ArgumentParser) -> None:
    """Add a hidden argument for each entry of `FLAGS`.

    Arguments that are not passed are absent from the namespace.
    """
    for name in FLAGS:
        flags = [f"--{name.replace('_', '-')}", *_SHORT.get(name, ())]
        settings: dict[str, Any] = {"dest": name, "default": SUPPRESS, "help": SUPPRESS}
        if name in _SWITCHES or name.startswith(("enable_", "disable_f", "disable_u")):
            parser.add_argument(*flags, action=BooleanOptionalAction, **settings)
        else:
            parser.add_argument(*flags, type=json_or_text, **settings)


def check_server_flags(args: Namespace) -> None:
    """Raise `ValueError` with an alternative for the first flag that is not supported."""
    for name, (accepts, instead) in FLAGS.items():
        if name not in args:
            continue
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        given = flag if value is True else f"--no-{flag[2:]}" if value is False else ""
        given = given or f"{flag} {shown(value)}"
        if not accepts(value):
            raise ValueError(f"{given} is vLLM's and not implemented here: {instead}")
        logger.info("%s has no effect here: %s", given, instead)
