"""Conversations for the training and the evaluation of the bundled model.

There are three kinds of turns: the meaning of a term of the glossary, two-digit addition, and some
small talk, with a polite "I only know ..." for everything else. All are derived from
``glossary.json`` and the wordings of ``phrasings.py`` by one seeded random generator: the same seed
gives the same conversations on every machine.

Two sets are held out of training. The ``UNSEEN`` wordings test that the model finds the term in a
new question. One tenth of the *unordered* pairs of addends test that it adds: holding out 47 + 85
while training on 85 + 47 would only test that addition commutes.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from training import phrasings

# Where the package keeps what these scripts make.
BUNDLED = Path(__file__).parents[1] / "nanoserve" / "checkpoint" / "tiny_qwen3"
GLOSSARY_PATH = BUNDLED / "glossary.json"
# Written together with the bundled weights: the glossary may have more terms now.
TRAINED_PATH = BUNDLED / "model" / "terms.json"
LANGUAGES = ("en", "zh")
Message = dict[str, str]

# Shares of the turns. Addition is a rule among a list of facts: it needs many examples, but they
# are short, about 30 tokens against 80.
TURN_WEIGHTS = {"glossary": 0.52, "addition": 0.36, "small_talk": 0.05, "unknown": 0.07}


@dataclass(frozen=True)
class Term:
    """Glossary entry: its names in two languages, and its definition in each.

    course_en, course_zh: the definition on the course's page, where it is newer than the one that
        the bundled weights were trained on.
    """

    term: str
    aliases: tuple[str, ...]
    zh_term: str
    en: str
    zh: str
    course_en: str = ""
    course_zh: str = ""

    def definition(self, language: str) -> str:
        """Return the definition in a language, "en" or "zh"."""
        return self.zh if language == "zh" else self.en


Terms = tuple[Term, ...]


@dataclass(frozen=True)
class Turn:
    """Question of the user, and the answer that the model should give, word for word."""

    question: str
    answer: str


@dataclass(frozen=True)
class Probe:
    """Evaluation item: the messages so far, and the answer that is expected next."""

    messages: list[Message]
    expected: str


@cache
def load_glossary() -> Terms:
    """Return the terms of the glossary, in file order."""
    entries = json.loads(GLOSSARY_PATH.read_text(encoding="utf-8"))
    return tuple(Term(**{**entry, "aliases": tuple(entry["aliases"])}) for entry in entries)


@cache
def trained_terms() -> Terms:
    """Return the terms of the glossary that the bundled weights were trained on."""
    names = set(json.loads(TRAINED_PATH.read_text(encoding="utf-8")))
    return tuple(term for term in load_glossary() if term.term in names)


@cache
def addition_pairs() -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Return all ordered pairs of addends 0-99, as (training pairs, held-out pairs)."""
    unordered = [(a, b) for a in range(100) for b in range(a, 100)]
    held_out = set(random.Random("addition").sample(unordered, len(unordered) // 10))
    ordered = [(a, b) for a in range(100) for b in range(100)]
    unseen = [pair for pair in ordered if (min(pair), max(pair)) in held_out]
    seen = [pair for pair in ordered if (min(pair), max(pair)) not in held_out]
    return tuple(seen), tuple(unseen)


def is_chinese(text: str) -> bool:
    """Return True if the text has at least one Chinese character."""
    return any("\u4e00" <= char <= "\u9fff" for char in text)


def surface_name(rng: random.Random, term: Term, language: str) -> str:
    """Return one of the names of a term, in one of the spellings that users write."""
    names = [term.term, *term.aliases]
    if language == "zh":
        name = term.zh_term if rng.random() < 0.6 else rng.choice(names)
        return name.replace(" ", "") if is_chinese(name) and rng.random() < 0.3 else name
    name = term.term if rng.random() < 0.6 else rng.choice(names)
    if rng.random() < 0.05:
        name = name.replace("-", " ")
    return rng.choice((name, name, name, name.lower(), name.lower(), name.title(), name.upper()))


def seen_wording(rng: random.Random, language: str) -> str:
    """Return a wording of the training set: a whole one, or a context joined with a request."""
    if rng.random() < 0.6:
        return rng.choice(phrasings.SEEN[language])
    context = rng.choice(phrasings.CONTEXTS[language])
    request = rng.choice(phrasings.REQUESTS[language])
    if language == "zh":
        return context + request
    return f"{context} {request.capitalize() if context.endswith('.') else request}"


def fill(rng: random.Random, template: str, name: str, language: str) -> str:
    """Put a name into a wording, with the article or the spaces that a writer would choose."""
    if language == "zh":
        padded = f" {name} " if name[0].isascii() and rng.random() < 0.5 else name
        return template.format(t=padded).strip()
    article = "" if template.startswith("{t}") else rng.choice(("", "", "a ", "the "))
    return template.format(t=article + name)


def loosen(rng: random.Random, question: str, language: str) -> str:
    """Vary what does not change the meaning: greeting, remarks, thanks, punctuation, case."""
    if rng.random() < 0.08:
        question = rng.choice(phrasings.FILLERS[language]) + question
    if rng.random() < 0.08:
        question = rng.choice(phrasings.OPENERS[language]) + question
    if rng.random() < 0.2:
        question = question.rstrip("?.？。")
    elif rng.random() < 0.08:
        question += rng.choice(phrasings.CLOSERS[language])
    if language == "zh" and rng.random() < 0.2:
        question = question.replace("？", "?").replace("，", ",").replace("。", ".")
    return question.lower() if rng.random() < 0.1 else question


def ask(rng: random.Random, wording: str, name: str, language: str) -> str:
    """Return a question about a name, which may be a term of the glossary or any other topic."""
    if wording in phrasings.BARE_ZH and not is_chinese(name):
        wording = phrasings.SEEN["zh"][0]
    return loosen(rng, fill(rng, wording, name, language), language)


def glossary_turn(
    rng: random.Random, term: Term, language: str, wording: str | None = None
) -> Turn:
    """Return a turn about one term, in a seen wording unless one is given."""
    wording = wording or seen_wording(rng, language)
    name = surface_name(rng, term, language)
    return Turn(ask(rng, wording, name, language), term.definition(language))


def addition_turn(rng: random.Random, pair: tuple[int, int]) -> Turn:
    """Return a turn about one sum; the answer is the same in both languages."""
    a, b = pair
    template = rng.choice(phrasings.ADDITION_EN + phrasings.ADDITION_ZH)
    return Turn(template.format(a=a, b=b), f"{a} + {b} = {a + b}.")


def small_talk_turn(rng: random.Random) -> Turn:
    """Return a turn of small talk: a greeting, a question about the model, thanks or a farewell."""
    answer, lines = rng.choice(phrasings.SMALL_TALK)
    line = rng.choice(lines)
    line = rng.choice((line, line.capitalize(), line.capitalize(), line.upper()))
    marks = ("", "！", "。", "？") if is_chinese(line) else ("", "!", ".", "?")
    return Turn(line + rng.choice(marks), answer)


def invented_word(rng: random.Random) -> str:
    """Return a word without a meaning, such as "trapoxrin" or "Vinka GORSHU"."""
    count = rng.randint(1, 2)
    words = ["".join(rng.choices(phrasings.SYLLABLES, k=rng.randint(2, 3))) for _ in range(count)]
    return " ".join(rng.choice((word, word.capitalize(), word.upper())) for word in words)


def other_arithmetic(rng: random.Random, language: str) -> str:
    """Return a calculation that the model did not learn: large numbers, or another operation."""
    sign = rng.choice("+-*/")
    a, b = rng.randint(100, 999) if sign == "+" else rng.randint(0, 99), rng.randint(0, 999)
    return f"{a} {sign} {b} 等于多少？" if language == "zh" else f"What is {a} {sign} {b}?"


def unknown_turn(rng: random.Random, topics: dict[str, tuple[str, ...]]) -> Turn:
    """Return a turn outside the course: a topic, an invented term, a question or a calculation."""
    language = rng.choice(LANGUAGES)
    kind = rng.choices(("topic", "invented", "question", "arithmetic"), (5, 4, 3, 2))[0]
    if kind == "topic":
        question = ask(rng, seen_wording(rng, language), rng.choice(topics[language]), language)
    elif kind == "invented":
        question = ask(rng, seen_wording(rng, language), invented_word(rng), language)
    elif kind == "question":
        question = loosen(rng, rng.choice(phrasings.UNKNOWN_QUESTIONS[language]), language)
    else:
        question = other_arithmetic(rng, language)
    return Turn(question, phrasings.UNKNOWN_ANSWER[language])


def training_turns(seed: int, terms: Terms | None = None) -> Iterator[Turn]:
    """Yield turns without end. Every term comes in both languages before any term comes again.

    terms: the terms of the questions; by default the whole glossary.
    """
    rng = random.Random(seed)
    questions = [(term, language) for term in terms or load_glossary() for language in LANGUAGES]
    pairs, _ = addition_pairs()
    kinds, weights = list(TURN_WEIGHTS), list(TURN_WEIGHTS.values())
    remaining: list[tuple[Term, str]] = []
    while True:
        kind = rng.choices(kinds, weights)[0]
        if kind == "glossary":
            remaining = remaining or rng.sample(questions, len(questions))
            term, language = remaining.pop()
            yield glossary_turn(rng, term, language)
        elif kind == "addition":
            yield addition_turn(rng, rng.choice(pairs))
        elif kind == "small_talk":
            yield small_talk_turn(rng)
        else:
            yield unknown_turn(rng, phrasings.UNKNOWN_TOPICS)


def tokenizer_texts() -> list[str]:
    """Return the texts to train the tokenizer on: answers, names, and the wordings around names.

    Names and wordings are kept apart, so that no merge joins the end of a wording to the
    beginning of a term: Chinese has no spaces to prevent it, and the term would then have other
    tokens in every question.
    """
    terms = load_glossary()
    answers = [text for term in terms for text in (term.en, term.zh)]
    answers += [answer for answer, _ in phrasings.SMALL_TALK]
    answers += list(phrasings.UNKNOWN_ANSWER.values())
    names = [name for term in terms for name in (term.term, term.zh_term, *term.aliases)]
    names += [name.lower() for name in names]
    groups = (
        phrasings.SEEN,
        phrasings.CONTEXTS,
        phrasings.REQUESTS,
        phrasings.FILLERS,
        phrasings.OPENERS,
        phrasings.UNKNOWN_TOPICS,
    )
    wordings = [text for group in groups for language in LANGUAGES for text in group[language]]
    wordings += [line for _, lines in phrasings.SMALL_TALK for line in lines]
    return answers + names + [part for text in wordings for part in text.split("{t}")]


def as_messages(turns: list[Turn], system: str | None = None) -> list[Message]:
    """Return turns as chat messages, including the last answer."""
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def probe(turns: list[Turn], system: str | None = None) -> Probe:
    """Return an item with the last turn as the question, and the turns before it as history."""
    return Probe(as_messages(turns, system)[:-1], turns[-1].answer)


def glossary_probes(seed: int, terms: Terms) -> dict[str, list[Probe]]:
    """Return the items for every term in both languages, by the name of their evaluation set.

    Each term has three random seen wordings, and all three unseen ones.
    """
    rng = random.Random(seed)
    sets: dict[str, list[Probe]] = {}
    for language in LANGUAGES:
        for split, wordings in (("seen", (None,) * 3), ("unseen", phrasings.UNSEEN[language])):
            sets[f"glossary {language} {split}"] = [
                probe([glossary_turn(rng, term, language, wording)])
                for term in terms
                for wording in wordings
            ]
    return sets


def any_glossary_turns(rng: random.Random, terms: Terms) -> list[Turn]:
    """Return a turn for every term in both languages, three in four with an unseen wording."""
    return [
        glossary_turn(rng, term, language, rng.choice((None, *phrasings.UNSEEN[language])))
        for term in terms
        for language in LANGUAGES
    ]


def evaluation_sets(seed: int = 2, terms: Terms | None = None) -> dict[str, list[Probe]]:
    """Return all evaluation items, by the name of their set.

    terms: those that the model was trained on; by default the bundled model's. The glossary may
    have newer ones.
    """
    terms = terms or trained_terms()
    sets = glossary_probes(seed, terms)
    rng = random.Random(seed + 1)
    unseen_pairs = addition_pairs()[1]
    sets["addition unseen pairs"] = [probe([addition_turn(rng, pair)]) for pair in unseen_pairs]
    sets["small talk"] = [probe([small_talk_turn(rng)]) for _ in range(100)]
    for name, topics in (
        ("unknown seen topics", phrasings.UNKNOWN_TOPICS),
        ("unknown unseen topics", phrasings.UNKNOWN_TOPICS_UNSEEN),
    ):
        sets[name] = [probe([unknown_turn(rng, topics)]) for _ in range(100)]
    history = training_turns(seed + 2, terms)
    fifth = any_glossary_turns(rng, terms)
    fifth += [addition_turn(rng, pair) for pair in rng.sample(unseen_pairs, 60)]
    sets["multi-turn, 5th turn"] = [probe([*islice(history, 4), turn]) for turn in fifth]
    sets["after a system message"] = [
        probe([turn], rng.choice(phrasings.SYSTEM_MESSAGES))
        for turn in any_glossary_turns(rng, terms)
    ]
    return sets
