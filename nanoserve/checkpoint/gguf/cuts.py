"""The pre-tokenizers of byte-level BPE, by the names that llama.cpp gives them.

A pre-tokenizer cuts a text into pieces, within which merges apply. The patterns come from the
models' tokenizer.json files.
"""

from typing import NamedTuple


class Cut(NamedTuple):
    """A pre-tokenizer: each pattern cuts the pieces that the one before it has left."""

    patterns: tuple[str, ...] = ()
    is_gpt2: bool = False  # the last cut is GPT-2's, which the library tokenizers has
    is_normalized: bool = False  # to NFC
    keeps_words: bool = False  # a piece that is in the vocabulary is one token, without merges
    splits_digits: bool = False
    adds_bos: bool = False  # default, if the file has no setting


_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# Runs of letters, numbers of up to three digits, and runs of the rest: OpenAI's cl100k. Llama 3,
# DBRX and GLM-4 have it, too, and Qwen's differ in the digits.
_CL100K = _SHORT_FORMS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_ONE_DIGIT = _CL100K.replace("{1,3}", "")
_QWEN2 = Cut((_ONE_DIGIT,), is_normalized=True)
_MARKS = _ONE_DIGIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_LLAMA3 = Cut((_CL100K,), keeps_words=True, adds_bos=True)
# A word is capital letters and then small ones: OpenAI's o200k.
_CAPITAL, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}*{_SMALL}+{_SHORT_FORMS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}+{_SMALL}*{_SHORT_FORMS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
_DIGITS = Cut(is_gpt2=True, splits_digits=True)
# Chinese and Japanese, by their blocks in Unicode, are cut off first.
_DEEPSEEK_V3 = Cut(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
    )
)
# Capital and small letters, of a selection of scripts.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CHINESE_OR_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = Cut(
    (
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        r"\s?[!-/:-~" "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CHINESE_OR_KOREAN,
        r"\p{N}",
    )
)
_DEEPSEEK_CODER = Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_OR_KOREAN, r"\p{N}"))
CUTS = {
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "qwen35": _QWEN2._replace(patterns=(_MARKS,)),
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3._replace(adds_bos=False),  # also SmolLM3's
    "dbrx": Cut((_CL100K,)), "glm4": Cut((_CL100K,), keeps_words=True),
    "gpt-4o": Cut((_O200K,), keeps_words=True),
    "gpt-2": Cut(is_gpt2=True), "smollm": _DIGITS, "refact": _DIGITS, "starcoder": _DIGITS,
    "deepseek-v3": _DEEPSEEK_V3, "deepseek-llm": _DEEPSEEK_LLM, "deepseek-coder": _DEEPSEEK_CODER,
}  # fmt: skip
