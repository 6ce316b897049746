"""Errors for requests that exceed the model's context, in the words that clients search for."""


class ContextLengthError(ValueError):
    """The prompt, or the prompt and the requested output, has more tokens than the context.

    LiteLLM, LangChain and coding agents search for this sentence, which is OpenAI's and vLLM's, and
    then shorten the conversation or switch to another model.
    """

    @classmethod
    def of(
        cls,
        max_model_len: int,
        num_prompt_tokens: int,
        max_tokens: int | None,
        reason: str = "",
        is_at_least: bool = False,
    ) -> "ContextLengthError":
        """Return the error for a prompt of `num_prompt_tokens`, or more with `is_at_least`.

        max_tokens: the requested number of output tokens; None counts as 1. reason: a further
        sentence.
        """
        num_output = 1 if max_tokens is None else max_tokens
        num_tokens = f"{'at least ' if is_at_least else ''}{num_prompt_tokens + num_output}"
        return cls(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {num_tokens} tokens ({num_prompt_tokens} in the messages, "
            f"{num_output} in the completion). Please reduce the length of the messages or "
            f"completion.{reason and f' {reason}'}"
        )


def prompt_too_long(
    max_model_len: int, num_tokens: int, max_tokens: int | None
) -> ContextLengthError:
    """Return the error for a prompt that leaves no room for a token of output."""
    return ContextLengthError.of(
        max_model_len,
        num_tokens,
        max_tokens,
        f"The prompt is too long: it has {num_tokens} tokens; max_model_len={max_model_len} leaves "
        f"room for at most {max_model_len - 1} and one token of output.",
    )
