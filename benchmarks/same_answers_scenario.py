"""The requests that `same_answers.py` puts to two versions of the engine, made from a seed.

A scenario is JSON: a list of configurations, each with the options of an `LLM` and with rounds of
requests. What a round does with its requests:

    generate     all of them at once, by `LLM.generate`
    one_by_one   each alone, so that how much of its prompt was cached is the same in all engines
    turns        each alone, and most of them go on where the one before has ended
    engine       by `add_request` and `step`: a request may arrive at a later step, and may be
                 aborted after it has yielded so many tokens; the prefix cache is
                 reset at the steps of `reset_at`, and what runs is computed again
    stream       by `LLM.stream`, all of them read in turn; a stream may be dropped early
    beam         by `LLM.beam_search`
    refused      each alone, by `LLM.generate`: most of them are errors
    options      options of further engines, most of them errors
"""

import random
from typing import Any

VOCAB_SIZE = 2048  # of tiny-qwen3; ids below 3 are its special tokens
QUESTIONS = (
    *("What is a KV cache?", "What is a block table?", "Explain continuous batching."),
    *("Why is decoding slow?", "What does top_p do?", "How does a prefix cache work?"),
    *("What is speculative decoding?", "What is tensor parallelism?", "Why preempt a request?"),
    *("什么是 KV cache？", "什么是块表？", "What is 12 + 30?"),
)
TEXTS = (
    "The scheduler gives each sequence",
    "A token that",
    "the cache the cache the cache the cache",
    "one two three four one two three four one two three",
    "Blocks are freed, blocks are shared, blocks are freed, blocks are",
    "日本語と é ü 🙂 text",
)
STOPS = (".", " the", ",", "\n", " cache", "oc", " of a", "s the", "token", "e")
# They begin in one token of English and end in another.
SPANNING_STOPS = ("e c", "s a", "d t", "e b", "n the", ", w", "es ", "t i", "ch s", "f th", "的块")
# Of the last ones only the end is ever written, which is allowed.
BAD_WORDS = (
    *("a token", "the", "of all", "KV cache", "the batch anew", "several tokens", "block"),
    *("zz values of", "zz of several", "zz at every", "zz KV blocks", "zz lists which", "zz up to"),
)
# Processors of a request, by their names in `same_answers_run.py`; the last three end it.
PROCESSORS = ("no_even_ids", "no_repeats", "raises_at_4", "makes_nan", "forbids_all")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["block", "token", "step"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_cached": {"type": "boolean"},
    },
    "required": ["name", "count", "is_cached"],
}
OF_ALL_BACKENDS: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}},
    {"json": SCHEMA, "disable_any_whitespace": False},
    {"json_object": True},
    {"regex": r"[a-f0-9]{8}-[a-f0-9]{4}"},
    {"regex": r"(The|A) (cache|block) is [a-z ]{3,12}\."},
    {"choice": ["a KV cache", "a KV block", "a step", "nothing"]},
    {"grammar": 'root ::= "yes" | "no, " [a-z]+ "."'},
)
GRAMMARS = (
    *OF_ALL_BACKENDS,
    {
        "structural_tag": {
            "structures": [{"begin": "<call>", "schema": SCHEMA, "end": "</call>"}],
            "triggers": ["<call>"],
        }
    },
    {"grammar": 'start: word (", " word)*\nword: "hit" | "miss" | /[0-9]{2}/'},
)
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "head": {"method": "hidden_head", "model": "tiny-qwen3"},
    "draft": {"method": "draft_model", "model": "tiny-qwen3"},
    "small-draft": {"method": "draft_model", "model": "tiny-qwen3-draft"},
}


class Requests:
    """Makes requests at random; the same seed makes the same ones."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self._heads = [self._ids(16) for _ in range(3)]
        self._middles = [self._ids(16) for _ in range(3)]
        self._num_made = 0

    def make(self, number: int, longest: int = 36, **fixed: Any) -> list[dict[str, Any]]:
        """Return `number` requests of every kind; `fixed` are parameters of all of them."""
        return [self._request(self._params(longest) | fixed) for _ in range(number)]

    def guided(
        self, number: int, grammars: tuple[dict[str, Any], ...] = GRAMMARS
    ) -> list[dict[str, Any]]:
        """Return requests with a grammar, and a quarter without one among them."""
        made = self.make(number, 40)
        for request in made:
            if self._often(0.75):
                request["params"]["structured_outputs"] = self._rng.choice(grammars)
                request["params"].pop("allowed_token_ids", None)
        return made

    def looping(self, number: int) -> list[dict[str, Any]]:
        """Return long requests that repeat themselves, which drafts pay for."""
        fixed = {"frequency_penalty": -1.5, "ignore_eos": True, "max_tokens": 70}
        made = self.make(number, 70, **fixed, stop=None, stop_token_ids=None)
        for request in made:
            request["params"].pop("min_tokens", None)
            request["params"].pop("num_speculative_tokens", None)
        return made

    def turns(self, number: int) -> list[dict[str, Any]]:
        """Return turns of conversations, which find the answers before them in the cache."""
        made = self.looping(number)
        for index, request in enumerate(made):
            request |= {"prompt": self._ids(self._rng.randint(1, 9)), "continues": index % 4 > 0}
            request["params"] |= {"max_tokens": self._rng.randint(1, 40), "prompt_logprobs": None}
        return made

    def fluent(self, number: int) -> list[dict[str, Any]]:
        """Return questions whose answers are prose, and run into stop strings and bad words."""
        rng, made = self._rng, self.make(number)
        for request in made:
            most, kind = rng.randint(10, 60), rng.choice(["delta", "cumulative", "final_only"])
            params = {"temperature": rng.choice([0, 0, 0.6]), "max_tokens": most}
            params |= {"seed": rng.randrange(99), "output_kind": kind}
            params["n"] = rng.choice([1, 2]) if params["temperature"] else 1
            params["include_stop_str_in_output"] = self._often(0.3)
            if self._often(0.5):
                params["stop"] = rng.sample(SPANNING_STOPS, rng.randint(1, 4))
            if self._often(0.3):
                # Some stop string begins at nearly every token, also at the last that has to be.
                params |= {"min_tokens": rng.randint(1, 9), "stop": ["e", " ", "a", "o"]}
            if self._often(0.5):
                params["bad_words"] = rng.sample(BAD_WORDS, 6)
            if self._often(0.3):
                params["logprobs"] = 1
            request |= {"params": params, "prompt": self._question()}
        return made

    def salted(self, number: int, longest: int = 8) -> list[dict[str, Any]]:
        """Return requests of few prompts, which share what is cached within a salt."""
        made = self.make(number, longest, prompt_logprobs=None)
        for request in made:
            token_ids = self._rng.choice(self._heads) + self._rng.choice(self._middles) + [7]
            salt = self._rng.choice([None, "red", "blue"])
            request["prompt"] = {"prompt_token_ids": token_ids, "cache_salt": salt}
        return made

    def with_arrivals(self, made: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
        """Let them arrive at steps below `most`."""
        for request in made:
            request["arrival"] = self._rng.randrange(most)
        return made

    def with_aborts(self, made: list[dict[str, Any]], share: float = 0.4) -> list[dict[str, Any]]:
        """Let some be aborted, after as many tokens as chosen here."""
        for request in made:
            if self._often(share):
                request["abort_after"] = self._rng.choice([0, 1, 2, 5, 9])
                request["params"]["output_kind"] = self._rng.choice(["delta", "cumulative"])
        return made

    def with_priorities(self, made: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for request in made:
            request["priority"] = self._rng.randint(-2, 2)
        return made

    def _request(self, params: dict[str, Any]) -> dict[str, Any]:
        self._num_made += 1
        return {"id": f"request-{self._num_made}", "prompt": self._prompt(), "params": params}

    def _prompt(self) -> Any:
        kind = self._rng.randrange(5)
        if kind == 0:
            return self._question()
        if kind == 1:
            return self._rng.choice(TEXTS)
        if kind == 2:
            return self._ids(self._rng.randint(1, 40))
        if kind == 3:  # a draft can be found in it
            return self._ids(self._rng.randint(2, 5)) * self._rng.randint(2, 6)
        # The middle is the same behind several heads: its hash is not, and its K and V are not.
        head = self._rng.choice(self._heads)
        return head + self._rng.choice(self._middles) + self._ids(self._rng.randint(0, 6))

    def _question(self) -> str:
        question = self._rng.choice(QUESTIONS)
        return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"

    def _params(self, longest: int) -> dict[str, Any]:
        rng, often = self._rng, self._often
        params: dict[str, Any] = {"max_tokens": rng.randint(1, longest), "temperature": 0}
        if often(0.6):
            params["temperature"] = rng.choice([0.3, 0.7, 1.0, 1.6])
        optional = {
            "seed": (0.5, lambda: rng.randrange(2**40)),
            "presence_penalty": (0.15, lambda: rng.choice([-1.5, 0.5, 2])),
            "frequency_penalty": (0.15, lambda: rng.choice([-0.5, 0.4, 1.5])),
            "repetition_penalty": (0.15, lambda: rng.choice([0.7, 1.1, 2.0])),
            "logit_bias": (0.12, lambda: {str(i): rng.uniform(-20, 6) for i in [1, *self._ids(8)]}),
            "bad_words": (0.12, lambda: rng.sample([" cache", "the", "KV", "token s", "is"], 2)),
            "allowed_token_ids": (0.08, lambda: [2, *self._ids(40)]),
            "stop": (0.25, lambda: rng.sample(STOPS, rng.randint(1, 3))),
            "include_stop_str_in_output": (0.3, lambda: True),
            "stop_token_ids": (0.15, lambda: [16, rng.choice([14, 270, 305])]),
            "min_tokens": (0.15, lambda: rng.randint(1, params["max_tokens"])),
            "ignore_eos": (0.3, lambda: True),
            "logprobs": (0.3, lambda: rng.choice([0, 1, 5])),
            "prompt_logprobs": (0.08, lambda: rng.choice([0, 2])),
            "logprob_token_ids": (0.05, lambda: self._ids(3)),
            "skip_special_tokens": (0.2, lambda: False),
            "spaces_between_special_tokens": (0.1, lambda: False),
            "output_kind": (0.7, lambda: rng.choice(["delta", "cumulative", "final_only"])),
            "logits_processors": (0.08, lambda: [rng.choice(PROCESSORS)]),
            "num_speculative_tokens": (0.2, lambda: rng.choice([0, 1, 3])),
        }
        if params["temperature"]:
            optional |= {
                "top_k": (0.25, lambda: rng.choice([1, 5, 40])),
                "top_p": (0.25, lambda: rng.choice([0.4, 0.8, 0.95])),
                "min_p": (0.15, lambda: rng.choice([0.02, 0.2])),
                "n": (0.2, lambda: rng.randint(2, 4)),
            }
        for name, (share, make) in optional.items():
            if often(share):
                params[name] = make()
        if often(0.08):
            params["detokenize"] = False
            params.pop("stop", None)
        return params

    def _ids(self, number: int) -> list[int]:
        return [self._rng.randrange(3, VOCAB_SIZE) for _ in range(number)]

    def _often(self, share: float) -> bool:
        return self._rng.random() < share


def make_scenario(seed: int, scale: float = 1.0) -> list[dict[str, Any]]:
    """Return the configurations, each with its rounds; `scale` multiplies the requests of each.

    `is_exact`: the steps are the same in each run, so numbers are equal to the last bit. Otherwise
    what runs together depends on time (how long a grammar is compiled, how many draft tokens pay),
    and log-probabilities are compared with a tolerance; tokens and texts never are.
    """
    made = []
    for name, options, kinds in _configurations():
        requests = Requests(f"{seed} {name}")
        rounds = []
        for kind, number in kinds:
            rounds += _rounds(requests, kind, max(2, round(number * scale)))
        is_adaptive = options.get("speculative_config", {}).get("adaptive", False)
        is_guided = any(kind.startswith("guided") for kind, _ in kinds)
        common = {"dtype": "float32", "num_threads": 1, "seed": 3, "max_model_len": 256}
        configuration = {"name": name, "options": common | options, "rounds": rounds}
        made.append(configuration | {"is_exact": not (is_adaptive or is_guided)})
    return made


def _rounds(requests: Requests, kind: str, number: int) -> list[dict[str, Any]]:
    if kind == "refused":
        return [{"kind": kind, "requests": list(REFUSED)}]
    if kind == "options":
        return [{"kind": kind, "requests": list(REFUSED_OPTIONS)}]
    if kind == "beam":
        chosen = [{"beam_width": width, "max_tokens": 6} for width in (1, 2, 4)]
        chosen.append({"beam_width": 3, "max_tokens": 8, "length_penalty": 0.2})
        chosen.append({"beam_width": 2, "max_tokens": 8, "early_stopping": True})
        prompts = requests.make(number)
        beams = [p | {"params": chosen[i % len(chosen)]} for i, p in enumerate(prompts)]
        return [{"kind": kind, "requests": beams}]
    if kind == "salted":
        return [{"kind": "one_by_one", "requests": requests.salted(number)}]
    if kind == "prompt_logprobs":
        made = requests.make(number, 4, prompt_logprobs=3, logprobs=20)
        return [{"kind": "generate", "requests": made}]
    if kind == "all_logprobs":
        made = requests.make(number, 3, prompt_logprobs=-1, logprobs=-1)
        return [{"kind": "generate", "requests": made}]
    how, _, what = kind.rpartition(" ")
    if how in ("guided", "guided-few"):
        made = requests.guided(number, GRAMMARS if how == "guided" else OF_ALL_BACKENDS)
    else:
        makers = {"looping": requests.looping, "fluent": requests.fluent, "turns": requests.turns}
        made = makers.get(how or what, requests.make)(number)
    if how == "priority":
        made = requests.with_priorities(made)
    if how == "reset":  # prompts, half of which want all their outputs, are computed twice
        for request in made[::2]:
            request["params"]["prompt_logprobs"] = 1
    if what in ("engine", "stream"):
        made = requests.with_aborts(made)
    if what == "engine":
        made = requests.with_arrivals(made, 4 * number // 3)
    one = {"kind": what, "requests": made}
    return [one | {"reset_at": [5, 12, 19, 40]} if how == "reset" else one]


def _configurations() -> list[tuple[str, dict[str, Any], list[tuple[str, int]]]]:
    """Return names, options, and kinds of rounds with their numbers of requests."""
    usual = [("generate", 50), ("engine", 50), ("stream", 10), ("fluent engine", 25)]
    guided = [("guided generate", 40), ("guided engine", 40), ("guided stream", 8)]
    tiny = {"block_size": 4, "num_kv_blocks": 40, "max_model_len": 120, "max_num_seqs": 8}
    chunks = {"max_num_batched_tokens": 16, "max_num_seqs": 16}
    ahead = {"async_scheduling": True}
    two_stages = {"pipeline_parallel_size": 2, "worker_timeout_seconds": 60}
    two_ranks = {"tensor_parallel_size": 2, "worker_timeout_seconds": 60}
    torch, numba = {"attention_backend": "torch"}, {"attention_backend": "numba"}
    by_priority = {"scheduling_policy": "priority"}
    few = [("guided-few generate", 30), ("guided-few engine", 30)]
    priority = [("priority generate", 60), ("priority engine", 60)]
    reset = ("reset engine", 40)

    made = [
        ("plain", {}, [*usual, ("prompt_logprobs", 20)]),
        ("torch", torch, usual),
        ("numba", numba, usual),
        ("one sequence", {"max_num_seqs": 1}, [("generate", 30), ("engine", 30)]),
        ("three sequences", {"max_num_seqs": 3, "block_size": 1}, usual),
        ("no prefix cache", {"enable_prefix_caching": False, "block_size": 32}, usual),
        ("turns", {"block_size": 4}, [("turns", 40)]),
        (
            "turns tiny async",
            tiny | ahead | {"block_size": 1, "num_kv_blocks": 300},
            [("turns", 40)],
        ),
        ("salts", {"block_size": 8}, [("salted", 80), ("engine", 30)]),
        ("chunks", chunks | {"long_prefill_token_threshold": 5}, usual),
        ("small chunks", {"max_num_batched_tokens": 3, "max_num_seqs": 3}, [("engine", 40), reset]),
        ("tiny pool", tiny, [*usual, reset]),
        ("tiny pool torch", tiny | torch, usual),
        ("priorities", by_priority | {"max_num_seqs": 4}, priority),
        ("priorities tiny", by_priority | tiny | {"priority_aging": 3}, priority),
        ("int8 cache numba", {"kv_cache_dtype": "int8"} | numba, usual),
        ("int8 cache torch", {"kv_cache_dtype": "int8"} | torch, usual),
        ("async", ahead, usual),
        ("async tiny", ahead | tiny, [*usual, reset]),
        ("async chunks", ahead | chunks, usual),
        ("async priorities", ahead | tiny | by_priority, priority),
        ("tp 2", two_ranks, [("generate", 30), ("engine", 30)]),
        ("tp 2 async ngram", two_ranks | ahead | _spec("ngram"), [("engine", 30)]),
        ("tp 2 guided", two_ranks, [("guided engine", 20)]),
        ("pp 2", two_stages, [("generate", 30), ("engine", 30)]),
        ("pp 2 tiny", two_stages | tiny, [("engine", 40)]),
        ("pp 2 ngram", two_stages | _spec("ngram"), [("generate", 20), ("engine", 30)]),
        ("pp 2 draft", two_stages | _spec("draft"), [("engine", 20)]),
        ("pp 2 guided", two_stages, [("guided engine", 30)]),
        ("pp 2 suffix guided", two_stages | _spec("suffix"), [("guided engine", 30)]),
        ("guided", {}, guided),
        ("guided async", ahead, guided),
        ("guided tiny", tiny, guided),
        ("guided no jump", {"structured_outputs_config": {"jump_forward": False}}, guided),
        ("guided xgrammar", {"structured_outputs_config": {"backend": "xgrammar"}}, few),
        ("guided priorities", tiny | by_priority, [("guided engine", 40)]),
        ("beam", {"max_logprobs": 5}, [("beam", 20), ("generate", 10)]),
        ("beam async ngram", ahead | _spec("ngram"), [("beam", 15)]),
        ("all logprobs", {"max_logprobs": -1}, [("all_logprobs", 8)]),
        ("refused", {"max_model_len": 64}, [("refused", 0), ("options", 0), ("generate", 10)]),
        ("refused spec", _spec("ngram") | ahead, [("refused", 0), ("engine", 10)]),
    ]
    adaptive = [("engine", 40), ("looping generate", 20)]
    both = [("engine", 40), ("looping engine", 20)]
    for method in METHODS:
        made += [
            (method, _spec(method), [*usual, reset, ("looping engine", 20)]),
            (f"{method} turns", _spec(method) | {"block_size": 2}, [("turns", 40)]),
            (f"{method} adaptive", _spec(method, True) | {"max_num_seqs": 3}, adaptive),
            (f"{method} tiny", _spec(method) | tiny, [("generate", 30), ("engine", 60)]),
            (f"{method} async", _spec(method) | ahead | {"max_num_seqs": 4}, usual),
            (f"{method} async tiny", _spec(method) | ahead | tiny, both),
            (f"{method} guided", _spec(method), [("guided generate", 20), ("guided engine", 30)]),
            (f"{method} guided async", _spec(method) | ahead, [("guided engine", 40)]),
        ]
    return made


def _spec(method: str, adaptive: bool = False) -> dict[str, Any]:
    chosen = {"num_speculative_tokens": 4, "adaptive": adaptive}
    return {"speculative_config": METHODS[method] | chosen}


def _bad(prompt: Any = "A token", **params: Any) -> dict[str, Any]:
    return {"prompt": prompt, "params": params}


REFUSED = (
    *(_bad(temperature=value) for value in (-1, "hot", float("inf"))),
    *(_bad(top_p=value) for value in (0, 1.5)),
    *(_bad(top_k=value) for value in (-2, 1.5)),
    *(_bad(min_p=2), _bad(n=0), _bad(n=2, temperature=0), _bad(max_tokens=0)),
    *(_bad(min_tokens=9, max_tokens=3), _bad(presence_penalty=3), _bad(frequency_penalty=-3)),
    *(_bad(repetition_penalty=0), _bad(seed=-2), _bad(seed=2**64), _bad(logprobs=21)),
    *(_bad(logprobs=-2), _bad(prompt_logprobs=21), _bad(logprobs=-1), _bad(ignore_eos=1)),
    *(_bad(stop=""), _bad(stop=["a", ""]), _bad(stop=[3]), _bad(stop="a", detokenize=False)),
    *(_bad(stop=["a"] * 1025), _bad(stop_token_ids=[VOCAB_SIZE]), _bad(stop_token_ids=["a"])),
    *(_bad(bad_words=["b" * 1025]), _bad(bad_words=[""]), _bad(logit_bias={"5000": 1})),
    *(_bad(logit_bias={"5": 101}), _bad(allowed_token_ids=[]), _bad(allowed_token_ids=[-1])),
    *(_bad(logprob_token_ids=[3] * 129), _bad(logprob_token_ids=[VOCAB_SIZE])),
    *(_bad(num_speculative_tokens=-1), _bad(extra_args=3), _bad(unheard_of=1), _bad(best_of=2)),
    *(_bad(prompt) for prompt in ("", [], [VOCAB_SIZE], [-1], [1.5], {"prompt": 3}, 7)),
    *(_bad(prompt) for prompt in ([5] * 300, "a cache " * 200, {"text": "a"}, {})),
    _bad({"prompt_token_ids": [5], "cache_salt": ""}),
    _bad(structured_outputs={}),
    _bad(structured_outputs={"regex": "a", "choice": ["b"]}),
    *(_bad(structured_outputs={"regex": text}) for text in ("(", "(?=a)b", "a{2,1}")),
    *(_bad(structured_outputs={"choice": value}) for value in ([], ["", "a"])),
    *(_bad(structured_outputs={"grammar": text}) for text in ("start: missing", "", "start ::= (")),
    *(_bad(structured_outputs={"json": text}) for text in ("{", '{"type": "unheard-of"}')),
    _bad(structured_outputs={"json": {"type": "array", "uniqueItems": True}}),
    _bad(structured_outputs={"json": {"minimum": 3, "maximum": 1, "type": "integer"}}),
    # These are accepted, and end with an error or as any other.
    _bad(allowed_token_ids=[2], min_tokens=3, temperature=0),
    _bad(logits_processors=["raises_at_4"], temperature=0),
    _bad(logits_processors=["makes_nan"], n=2),
    _bad(temperature=0, max_tokens=None),
)
REFUSED_OPTIONS: tuple[dict[str, Any], ...] = (
    *({"max_num_seqs": 0}, {"max_num_batched_tokens": 4}, {"max_model_len": 4096}, {"dtype": "x"}),
    *({"num_kv_blocks": 4, "max_model_len": 200}, {"block_size": 0}, {"unheard_of": 1}),
    *({"priority_aging": 2}, {"kv_cache_dtype": "int3"}, {"attention_backend": "abacus"}),
    *({"pipeline_parallel_size": 2, "async_scheduling": True}, {"scheduling_policy": "lifo"}),
    *({"speculative_config": {"method": name}} for name in ("magic", "draft_model", "ngram")),
    {"pipeline_parallel_size": 2} | _spec("head"),
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 33}},
    {"speculative_config": {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}},
    *({"structured_outputs_config": value} for value in ({"backend": "x"}, {"speed": 1}, 3)),
)
