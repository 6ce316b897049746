"""Request bodies of the endpoints that pool, with the fields of OpenAI, Jina, Cohere and vLLM."""

from collections.abc import Sequence
from typing import Any, ClassVar

from nanoserve.compat.request_names import HARMLESS, Foreign
from nanoserve.pooling_params import PoolingParams
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import Body, Int, Prompts, as_prompts
from nanoserve.serve.http.unknown_fields import UnknownNames, check_names

Document = str | dict[str, Any]


class PoolingBody(Body):
    """The fields that all endpoints have in common.

    `fields` are those of the texts; errors about a text name the first of them.
    """

    fields: ClassVar[tuple[str, ...]]

    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    use_activation: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    def params(self, **own: Any) -> PoolingParams:
        """Return the parameters of the request; raises `ApiError` for values out of range."""
        names = PoolingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        given = {name: getattr(self, name) for name in names}
        try:
            return PoolingParams(**given | own)
        except ValueError as error:
            raise ApiError.of(error) from None

    def prompt_of(self, content: Any) -> dict[str, Any]:
        """Return text or token ids as a prompt of the engine, with the cache salt if any."""
        prompt = {"prompt" if isinstance(content, str) else "prompt_token_ids": content}
        return prompt if self.cache_salt is None else prompt | {"cache_salt": self.cache_salt}


class InputBody(PoolingBody):
    """The fields of endpoints that pool each text by itself."""

    fields: ClassVar[tuple[str, ...]] = ("input",)

    input: Prompts
    add_special_tokens: bool | None = None

    def inputs(self) -> list[str | list[int]]:
        return as_prompts(self.input)


class EmbeddingBody(InputBody):
    """Request body of `POST /v1/embeddings`."""

    encoding_format: str | None = None
    dimensions: Int | None = None
    normalize: bool | None = None


class RawPoolingBody(EmbeddingBody):
    """Request body of `POST /pooling`."""

    task: str | None = None
    pooling_type: str | None = None


class ClassifyBody(InputBody):
    """Request body of `POST /classify`."""


class PairsBody(PoolingBody):
    """The fields of endpoints that score pairs of texts."""

    instruction: str | None = None  # nanoserve's: for the template of the pair


class ScoreBody(PairsBody):
    """Request body of `POST /score`: one text or as many, and other texts."""

    fields: ClassVar[tuple[str, ...]] = ("text_2", "text_1")

    text_1: Prompts | None = None
    text_2: Prompts | None = None
    queries: Prompts | None = None  # vLLM's newer names
    documents: Prompts | None = None
    data_1: Prompts | None = None
    data_2: Prompts | None = None

    def texts(self) -> tuple[list[Any], list[Any]]:
        """Return both lists, whichever names they have."""
        first = _given(self, "text_1", "queries", "data_1")
        return as_prompts(first), as_prompts(_given(self, "text_2", "documents", "data_2"))


class RerankBody(PairsBody):
    """Request body of `POST /rerank`, `/v1/rerank` and `/v2/rerank`."""

    fields: ClassVar[tuple[str, ...]] = ("documents", "query")

    query: str
    documents: list[Document]
    top_n: Int | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """Return the texts of the documents; raises `ApiError` for one that has no text."""
        return [_text_of(number, document) for number, document in enumerate(self.documents)]


def _given(body: Body, *names: str) -> Any:
    """Return the one field that is given of several names for the same."""
    found = [name for name in names if getattr(body, name) is not None]
    if len(found) != 1:
        problem = f"{' and '.join(found)} are the same field" if found else f"{names[0]} is missing"
        raise ApiError(400, f"{problem}: pass {names[0]}", names[0])
    return getattr(body, found[0])


def _text_of(number: int, document: Document) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        message = f'documents[{number}] must be a string, or an object {{"text": "..."}}'
        raise ApiError(400, message, "documents")
    return text


_TEXTS_ONLY = "nanoserve embeds text and token ids only"
FOREIGN = {
    "messages": Foreign("render the conversation with /tokenize, and send its tokens as input"),
    "chat_template": Foreign("start the server with --chat-template FILE"),
    "embed_dtype": Foreign("embeddings are float32", ("float32", "float")),
    "endianness": Foreign("base64 has the numbers in little-endian order", ("native", "little")),
    "stream": Foreign("a result is complete at once", (False,)),
    "input_type": Foreign("write the instruction of a query into its text"),
    "prompt_name": Foreign("write the instruction of a query into its text"),
    "embedding_types": Foreign('use encoding_format "float" or "base64"', (["float"],)),
    "output_dtype": Foreign("embeddings are float32", ("float", "float32")),
    "images": Foreign(_TEXTS_ONLY, ([],)),
    "rank_fields": Foreign("a document is a string, or an object with a text", (["text"],)),
    "max_tokens_per_doc": Foreign("use truncate_prompt_tokens, which counts a whole prompt"),
    "max_chunks_per_doc": Foreign("a document is one prompt", (1,)),
    "late_chunking": Foreign("each text is embedded by itself", (False,)),
    "softmax": Foreign("use use_activation"),
    "activation": Foreign("use use_activation"),
    "raw_scores": Foreign("use use_activation", (False,)),
    "mm_processor_kwargs": Foreign(_TEXTS_ONLY, ({},)),
}
# Fields that change no number of a result.
_WITHOUT_EFFECT = HARMLESS | {"truncation"}


def check_pooling_fields(body: PoolingBody, unknown: UnknownNames, template: str = "") -> None:
    """Raise `ApiError` for an unsupported field that would change the result."""
    given = {name: value for name, value in (body.model_extra or {}).items()
             if name not in _WITHOUT_EFFECT}  # fmt: skip
    check_names(given, "", type(body).model_fields, FOREIGN, unknown)
    if body.truncation_side not in (None, "right"):
        message = f"truncation_side={body.truncation_side!r:.50} must be 'right': ends are cut off"
        raise ApiError(400, message, "truncation_side", "unsupported")
    encoding = getattr(body, "encoding_format", None)
    if encoding not in (None, "float", "base64"):
        message = f"encoding_format={encoding!r:.50} must be 'float' or 'base64'"
        raise ApiError(400, message, "encoding_format")


def check_count(name: str, texts: Sequence[Any], most: int) -> None:
    """Raise `ApiError` for no text, or for more than a request may have."""
    if not 1 <= len(texts) <= most:
        message = f"{name} has {len(texts)} texts; it must have 1 to {most} (max_prompts)"
        raise ApiError(400, message, name)
