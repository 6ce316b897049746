"""Mistakes planted into the solutions of the own engine, and the tests that name them.

Each is an edit of `solution.py`, or of `solution_features.py` from stage 11 on, as a reader may
have written it. tests/course/test_your_engine.py makes them one by one.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    stage: int
    what: str
    right: str  # as it is in the solution, where it occurs once
    wrong: str
    named_by: str  # the first test of its stage that fails


MISTAKES = (
    Mistake(
        1,
        "the norm sums instead of taking the mean",
        "x.square().mean(-1, keepdim=True)",
        "x.square().sum(-1, keepdim=True)",
        "test_the_norm_is_torchs",
    ),
    Mistake(
        1,
        "the norm has no weight",
        "keepdim=True) + eps) * weight",
        "keepdim=True) + eps)",
        "test_the_norm_is_torchs",
    ),
    Mistake(
        1,
        "frequencies are not inverted",
        "frequencies = 1 / theta **",
        "frequencies = theta **",
        "test_a_rotation_is_a_product_of_complex_numbers",
    ),
    Mistake(
        1,
        "the rotation goes the other way",
        "first * cos - second * sin, second * cos + first * sin",
        "first * cos + second * sin, second * cos - first * sin",
        "test_a_rotation_is_a_product_of_complex_numbers",
    ),
    Mistake(
        1,
        "neighbours are rotated, not halves",
        "x.chunk(2, dim=-1), angles.cos()",
        "(x[..., ::2], x[..., 1::2]), angles.cos()",
        "test_a_rotation_is_a_product_of_complex_numbers",
    ),
    Mistake(
        1,
        "KV heads are mixed up",
        "x.repeat_interleave(group, dim=1)",
        "x.repeat(1, group, 1)",
        "test_attention_is_torchs",
    ),
    Mistake(1, "scores are not scaled", " / q.shape[2] ** 0.5", "", "test_attention_is_torchs"),
    Mistake(
        1,
        "the mask assumes that all tokens are queries",
        "triu(length - n + 1)",
        "triu(1)",
        "test_attention_is_torchs",
    ),
    Mistake(
        1,
        "a token does not see itself",
        "triu(length - n + 1)",
        "triu(length - n)",
        "test_attention_is_torchs",
    ),
    Mistake(
        1,
        "softmax over the wrong dimension",
        ("-torch.inf).softmax(-1)\n    return torch.einsum"),
        ("-torch.inf).softmax(0)\n    return torch.einsum"),
        "test_attention_is_torchs",
    ),
    Mistake(
        1,
        "q is normed after its rotation",
        'rotate(rms_norm(q, w["self_attn.q_norm"], eps), positions, theta)',
        'rms_norm(rotate(q, positions, theta), w["self_attn.q_norm"], eps)',
        "test_logits_are_those_of_transformers",
    ),
    Mistake(
        1,
        "k and v are exchanged",
        'for name in "qkv"',
        'for name in "qvk"',
        "test_logits_are_those_of_transformers",
    ),
    Mistake(
        1,
        "no residual around the feed-forward",
        'hidden = hidden + F.linear(x, w["mlp.down_proj"])',
        'hidden = F.linear(x, w["mlp.down_proj"])',
        "test_logits_are_those_of_transformers",
    ),
    Mistake(
        1,
        "silu of up, not of gate",
        'F.silu(F.linear(x, w["mlp.gate_proj"])) * F.linear(x, w["mlp.up_proj"])',
        'F.linear(x, w["mlp.gate_proj"]) * F.silu(F.linear(x, w["mlp.up_proj"]))',
        "test_logits_are_those_of_transformers",
    ),
    Mistake(
        1,
        "no norm after the last layer",
        'return rms_norm(hidden, self.weights["model.norm"], eps)',
        "return hidden",
        "test_logits_are_those_of_transformers",
    ),
    Mistake(
        1,
        "the prompt is changed",
        "tokens, computed = list(prompt), 0",
        "tokens, computed = prompt, 0",
        "test_it_generates_the_most_likely_tokens",
    ),
    Mistake(
        1,
        "the prompt is returned as well",
        "return tokens[len(prompt) :]",
        "return tokens",
        "test_it_generates_the_most_likely_tokens",
    ),
    Mistake(
        2,
        "only the first chunk is kept",
        "self.kv[layer] = k, v",
        "self.kv.setdefault(layer, (k, v))",
        "test_chunks_are_attended_as_a_whole",
    ),
    Mistake(
        2,
        "layers share a cache",
        "self.kv[layer] = k, v",
        "self.kv = dict.fromkeys(range(99), (k, v))",
        "test_chunks_are_attended_as_a_whole",
    ),
    Mistake(
        2,
        "new tokens are put before the old ones",
        "zip(self.kv[layer], (k, v), strict=True)",
        "zip((k, v), self.kv[layer], strict=True)",
        "test_chunks_are_attended_as_a_whole",
    ),
    Mistake(
        2,
        "the position of a new token is 0",
        "positions = torch.arange(computed, len(tokens))",
        "positions = torch.arange(len(tokens) - computed)",
        "test_the_tokens_are_those_without_a_cache",
    ),
    Mistake(
        2,
        "all tokens are computed again",
        "computed = len(tokens) if cache else 0",
        "computed = 0",
        "test_the_tokens_are_those_without_a_cache",
    ),
    Mistake(
        3,
        "the last block is forgotten",
        "return -(-num_tokens // block_size)",
        "return num_tokens // block_size",
        "test_the_last_block_may_be_partly_empty",
    ),
    Mistake(
        3,
        "a block too many",
        "return -(-num_tokens // block_size)",
        "return num_tokens // block_size + 1",
        "test_the_last_block_may_be_partly_empty",
    ),
    Mistake(
        3,
        "slots begin at block 1",
        "return blocks * self.block_size",
        "return (blocks - 1) * self.block_size",
        "test_the_slots_of_the_chapter",
    ),
    Mistake(
        3,
        "the pool has no last block",
        "2, num_blocks + 1, block_size",
        "2, num_blocks, block_size",
        "test_what_is_stored_is_gathered",
    ),
    Mistake(
        3,
        "k is stored as v",
        "torch.stack([k, v])",
        "torch.stack([k, k])",
        "test_what_is_stored_is_gathered",
    ),
    Mistake(
        3,
        "all layers write into the first",
        "self.kv[layer].flatten(1, 2)[:, slots]",
        "self.kv[0].flatten(1, 2)[:, slots]",
        "test_what_is_stored_is_gathered",
    ),
    Mistake(
        3,
        "the copy of a reshape is written",
        "self.kv[layer].flatten(1, 2)[:, slots] =",
        "self.kv[layer].transpose(1, 2).flatten(1, 2)[:, slots] =",
        "test_what_is_stored_is_gathered",
    ),
    Mistake(
        3,
        "the end of the last block is gathered",
        ".flatten(1, 2)[:, :length].unbind()",
        ".flatten(1, 2).unbind()",
        "test_what_is_stored_is_gathered",
    ),
    Mistake(
        3,
        "blocks are gathered in the order of the pool",
        "blocks = table[: blocks_needed(length, self.block_size)]",
        "blocks = sorted(table[: blocks_needed(length, self.block_size)])",
        "test_what_is_stored_is_gathered",
    ),
    Mistake(
        4,
        "a hash without its parent",
        "sha256(parent + np",
        "sha256(np",
        "test_a_hash_depends_on_all_tokens_before",
    ),
    Mistake(
        4,
        "tokens as text without separators",
        "np.array(token_ids, dtype=np.int32).tobytes()",
        '"".join(map(str, token_ids)).encode()',
        "test_a_hash_depends_on_all_tokens_before",
    ),
    Mistake(
        4,
        "a hit of the last token",
        "self._hashes(seq, (len(seq.token_ids) - 1) // self.block_size)",
        "self._hashes(seq, len(seq.token_ids) // self.block_size)",
        "test_a_hit_never_covers_the_last_token",
    ),
    Mistake(
        4,
        "the newest copy is found",
        "[self.blocks_of[each][0] for each",
        "[self.blocks_of[each][-1] for each",
        "test_a_copy_is_found_when_the_first_is_gone",
    ),
    Mistake(
        4,
        "hits that are free are not counted",
        "if num_new + len(revived) > len(self.free_queue)",
        "if num_new > len(self.free_queue)",
        "test_what_does_not_fit_changes_nothing",
    ),
    Mistake(
        4,
        "hits stay in the free queue",
        "            del self.free_queue[block]",
        "            pass",
        "test_it_allocates_the_blocks_that_the_engine_allocates",
    ),
    Mistake(
        4,
        "blocks are taken from the end of the queue",
        "self.free_queue.popitem(last=False)[0]",
        "self.free_queue.popitem()[0]",
        "test_blocks_come_in_the_order_of_the_free_queue",
    ),
    Mistake(
        4,
        "a taken block keeps its hash",
        "self._evict(block)  # it will hold other content",
        "pass",
        "test_a_chain_loses_its_end_first",
    ),
    Mistake(
        4,
        "hits do not count as cached",
        "seq.num_cached += len(hits)",
        "pass",
        "test_it_allocates_the_blocks_that_the_engine_allocates",
    ),
    Mistake(
        4,
        "a shared block has one user",
        "self.ref_counts[block] += 1",
        "self.ref_counts[block] = 1",
        "test_it_allocates_the_blocks_that_the_engine_allocates",
    ),
    Mistake(
        4,
        "new blocks are put before the hits",
        "for block in [*hits, *new]:",
        "for block in [*new, *hits]:",
        "test_a_copy_is_found_when_the_first_is_gone",
    ),
    Mistake(
        4,
        "the first block is freed first",
        "block = seq.block_table.pop()",
        "block = seq.block_table.pop(0)",
        "test_a_chain_loses_its_end_first",
    ),
    Mistake(
        4,
        "a freed sequence counts as cached",
        "        seq.num_cached = 0\n",
        "",
        "test_a_freed_sequence_is_allocated_again",
    ),
    Mistake(
        4,
        "a copy goes to the end of the queue",
        "                    self.free_queue.move_to_end(block, last=False)\n",
        "",
        "test_a_copy_is_found_when_the_first_is_gone",
    ),
    Mistake(
        4,
        "copies are kept",
        "if self.blocks_of.get(self.hash_of.get(block)) != [block]:",
        "if block not in self.hash_of:",
        "test_a_copy_is_found_when_the_first_is_gone",
    ),
    Mistake(
        4,
        "a freed block loses its hash",
        "if self.blocks_of.get(self.hash_of.get(block)) != [block]:",
        "if self._evict(block) or self.hash_of.get(block):",
        "test_a_chain_loses_its_end_first",
    ),
    Mistake(
        4,
        "a block without a hash goes to the end",
        "if self.blocks_of.get(self.hash_of.get(block)) != [block]:",
        "if block in self.hash_of and self.blocks_of[self.hash_of[block]] != [block]:",
        "test_it_allocates_the_blocks_that_the_engine_allocates",
    ),
    Mistake(
        4,
        "blocks are cached again and again",
        "for i in range(seq.num_cached, len(hashes)):",
        "for i in range(len(hashes)):",
        "test_it_allocates_the_blocks_that_the_engine_allocates",
    ),
    Mistake(
        4,
        "every block is hashed as if it came first",
        'chain_hash(seq.hashes[-1] if seq.hashes else b"", tokens)',
        'chain_hash(b"", tokens)',
        "test_it_allocates_the_blocks_that_the_engine_allocates",
    ),
    Mistake(
        4,
        "a partly filled block is cached",
        "hashes = self._hashes(seq, num_tokens // self.block_size)",
        "hashes = self._hashes(seq, blocks_needed(num_tokens, self.block_size))",
        "test_it_allocates_the_blocks_that_the_engine_allocates",
    ),
    Mistake(
        4,
        "a block is free although it is shared",
        ("if self.ref_counts[block] == 0:\n                self.free_queue"),
        ("if self.ref_counts[block] >= 0:\n                self.free_queue"),
        "test_it_allocates_the_blocks_that_the_engine_allocates",
    ),
    Mistake(
        5,
        "all tokens in every step",
        "return min(len(seq.token_ids) - seq.num_computed, budget,",
        "return min(len(seq.token_ids), budget,",
        "test_a_prompt_and_a_decode_share_a_step",
    ),
    Mistake(
        5,
        "the budget is ignored",
        "budget, self.config.threshold or budget)",
        "self.config.threshold or 10**6)",
        "test_the_budget_cuts_a_prompt",
    ),
    Mistake(
        5,
        "blocks are cached a step late",
        "self.blocks.cache(seq, start + n)",
        "self.blocks.cache(seq, start)",
        "test_a_block_is_cached_when_a_step_fills_it",
    ),
    Mistake(
        5,
        "rows are sorted by their tokens",
        "plan.rows.sort(key=lambda row: row.n > 1)",
        "plan.rows.sort(key=lambda row: row.n)",
        "test_rows_of_one_token_come_first",
    ),
    Mistake(
        5,
        "rows are not sorted",
        "        plan.rows.sort(key=lambda row: row.n > 1)\n",
        "",
        "test_rows_of_one_token_come_first",
    ),
    Mistake(
        5,
        "admitted without budget",
        "while self.waiting and plan.budget and",
        "while self.waiting and",
        "test_it_plans_what_the_engine_plans",
    ),
    Mistake(
        5,
        "one sequence too many",
        "len(self.running) < self.config.max_num_seqs",
        "len(self.running) <= self.config.max_num_seqs",
        "test_it_plans_what_the_engine_plans",
    ),
    Mistake(
        5,
        "the hits are computed again",
        "seq.num_computed = len(hits) * self.config.block_size",
        "seq.num_computed = 0",
        "test_it_plans_what_the_engine_plans",
    ),
    Mistake(
        5,
        "the whole prompt is cached when it is admitted",
        "self.blocks.cache(seq, seq.num_computed + plan.rows[-1].n)",
        "self.blocks.cache(seq, len(seq.token_ids))",
        "test_a_block_is_cached_when_a_step_fills_it",
    ),
    Mistake(
        5,
        "an admitted sequence is not cached at once",
        "            self.blocks.cache(seq, seq.num_computed + plan.rows[-1].n)\n",
        "",
        "test_a_block_is_cached_when_a_step_fills_it",
    ),
    Mistake(
        5,
        "admitted before the running ones are planned",
        "        plan = Plan(self.config.budget)\n",
        ("        plan = Plan(self.config.budget)\n        self._admit(plan)\n"),
        "test_a_prompt_and_a_decode_share_a_step",
    ),
    Mistake(
        5,
        "EOS is appended",
        "if token_id not in seq.eos:",
        "if token_id is not None:",
        "test_the_eos_token_is_not_appended",
    ),
    Mistake(
        5,
        "EOS ends by length",
        '"stop" if is_stopped else "length"',
        '"length" if len(seq.token_ids) + 1 >= seq.max_len else "stop"',
        "test_the_eos_token_is_not_appended",
    ),
    Mistake(
        5,
        "one token too many",
        "len(seq.token_ids) >= seq.max_len",
        "len(seq.token_ids) > seq.max_len",
        "test_a_prompt_and_a_decode_share_a_step",
    ),
    Mistake(
        5,
        "a step computes one token",
        "            seq.num_computed += n\n",
        "            seq.num_computed += 1\n",
        "test_a_prompt_and_a_decode_share_a_step",
    ),
    Mistake(
        5,
        "finish fails the second time",
        ("        if seq in queue:\n            queue.remove(seq)"),
        "        queue.remove(seq)",
        "test_finish_works_in_any_state_and_twice",
    ),
    Mistake(
        5,
        "finish keeps the blocks",
        ("            queue.remove(seq)\n        self.blocks.free(seq)"),
        "            queue.remove(seq)",
        "test_finish_works_in_any_state_and_twice",
    ),
    Mistake(
        5,
        "finish leaves it in waiting",
        "queue = self.running if seq in self.running else self.waiting",
        "queue = self.running",
        "test_finish_works_in_any_state_and_twice",
    ),
    Mistake(
        5,
        "is_stopped is not called",
        "is_stopped = token_id in seq.eos or seq.is_stopped(seq)",
        "is_stopped = token_id in seq.eos",
        "test_a_sequence_with_a_stop_string_keeps_the_token",
    ),
    Mistake(
        5,
        "is_stopped is called before the token is appended",
        (
            "            if token_id not in seq.eos:\n"
            "                seq.token_ids.append(token_id)\n"
            "            is_stopped = token_id in seq.eos or seq.is_stopped(seq)\n"
        ),
        (
            "            is_stopped = token_id in seq.eos or seq.is_stopped(seq)\n"
            "            if token_id not in seq.eos:\n"
            "                seq.token_ids.append(token_id)\n"
        ),
        "test_a_sequence_with_a_stop_string_keeps_the_token",
    ),
    Mistake(
        6,
        "the threshold is ignored",
        ", self.config.threshold or budget)",
        ")",
        "test_the_threshold_leaves_tokens_for_others",
    ),
    Mistake(
        6,
        "a threshold of 0 is none at all",
        "self.config.threshold or budget)",
        "self.config.threshold)",
        "test_the_last_to_arrive_is_preempted",
    ),
    Mistake(
        6,
        "the first to arrive is preempted",
        "victim = self.running.pop()",
        "victim = self.running.pop(0)",
        "test_the_last_to_arrive_is_preempted",
    ),
    Mistake(
        6,
        "the victim still runs",
        "victim = self.running.pop()",
        "victim = self.running[-1]",
        "test_the_last_to_arrive_is_preempted",
    ),
    Mistake(
        6,
        "the victim's tokens count as computed",
        "            victim.num_computed = 0\n",
        "",
        "test_the_last_to_arrive_is_preempted",
    ),
    Mistake(
        6,
        "the victim queues at the end",
        "self.waiting.appendleft(victim)",
        "self.waiting.append(victim)",
        "test_it_plans_what_the_engine_plans",
    ),
    Mistake(
        6,
        "the plan does not name the victim",
        "            plan.preempted.append(victim)\n",
        "",
        "test_the_last_to_arrive_is_preempted",
    ),
    Mistake(
        6,
        "it preempts itself and goes on",
        ("            if victim is seq:\n                return False\n"),
        "",
        "test_the_victim_may_be_the_sequence_that_needs_the_block",
    ),
    Mistake(
        6,
        "the victim keeps its blocks",
        "            self.blocks.free(victim)\n",
        "",
        "test_the_last_to_arrive_is_preempted",
    ),
    Mistake(
        6,
        "a preempted sequence is planned",
        "if n and seq in self.running and",
        "if n and",
        "test_the_last_to_arrive_is_preempted",
    ),
    Mistake(
        6,
        "the victim is admitted again at once",
        ("        if not plan.preempted:\n            self._admit(plan)"),
        "        self._admit(plan)",
        "test_it_plans_what_the_engine_plans",
    ),
    Mistake(
        6,
        "only one victim is tried",
        "        while not self.blocks.allocate(seq, seq.num_computed + n):",
        "        if not self.blocks.allocate(seq, seq.num_computed + n):",
        "test_it_is_admitted_again_with_cached_blocks",
    ),
    Mistake(
        6,
        "blocks for the first chunk alone",
        "self.blocks.allocate(seq, len(seq.token_ids), hits)",
        (
            "self.blocks.allocate(seq, min(len(seq.token_ids), len(hits) *"
            " self.blocks.block_size + plan.budget), hits)"
        ),
        "test_it_plans_what_the_engine_plans",
    ),
    Mistake(
        6,
        "the next one overtakes the head",
        "                break  # no sequence overtakes the head",
        ("                self.waiting.rotate(-1)\n                break"),
        "test_it_plans_what_the_engine_plans",
    ),
    Mistake(
        6,
        "the victim loses its output",
        "            victim.num_computed = 0\n",
        (
            "            victim.num_computed = 0\n"
            "            del victim.token_ids[victim.num_prompt or 8 :]\n"
        ),
        "test_the_last_to_arrive_is_preempted",
    ),
    Mistake(
        7,
        "every row begins at position 0",
        "torch.arange(row.start, row.start + row.n)",
        "torch.arange(row.n)",
        "test_a_batch_computed_by_hand",
    ),
    Mistake(
        7,
        "the last tokens instead of the next ones",
        "torch.tensor(row.seq.token_ids)[at]",
        "torch.tensor(row.seq.token_ids[-row.n :])",
        "test_a_batch_computed_by_hand",
    ),
    Mistake(
        7,
        "no 0 in front of cu_seqlens",
        "self.cu_seqlens = [0, *accumulate(row.n for row in rows)]",
        "self.cu_seqlens = [*accumulate(row.n for row in rows)]",
        "test_a_batch_computed_by_hand",
    ),
    Mistake(
        7,
        "logits in the middle of a prompt",
        "[end - 1 for row, end in ends if row.catches_up]",
        "[end - 1 for row, end in ends]",
        "test_a_batch_computed_by_hand",
    ),
    Mistake(
        7,
        "logits of the next row's first token",
        "[end - 1 for row, end in ends if row.catches_up]",
        "[end for row, end in ends if row.catches_up]",
        "test_a_batch_computed_by_hand",
    ),
    Mistake(
        7,
        "slots by the order of the batch",
        "pool.slots(row.seq.block_table, at)",
        "pool.slots(row.seq.block_table, at - row.start)",
        "test_a_batch_computed_by_hand",
    ),
    Mistake(
        7,
        "each row is stored as it is attended",
        (
            "        self.pool.store(layer, self.slot_mapping, k, v)\n"
            "        parts = []\n"
            "        for (seq, start, n, _), first in zip(self.rows,"
            " self.cu_seqlens, strict=False):\n"
        ),
        (
            "        parts = []\n"
            "        for (seq, start, n, _), first in zip(self.rows,"
            " self.cu_seqlens, strict=False):\n"
            "            at = slice(first, first + n)\n"
            "            self.pool.store(layer, self.slot_mapping[at], k[at], v[at])\n"
        ),
        "test_a_block_may_be_filled_and_read_in_one_step",
    ),
    Mistake(
        7,
        "tokens are read that are not computed",
        "self.pool.gather(layer, seq.block_table, start + n)",
        "self.pool.gather(layer, seq.block_table, len(seq.token_ids))",
        "test_sequences_do_not_affect_each_other",
    ),
    Mistake(
        7,
        "the tokens of this step are not read",
        "self.pool.gather(layer, seq.block_table, start + n)",
        "self.pool.gather(layer, seq.block_table, max(start, n))",
        "test_a_block_may_be_filled_and_read_in_one_step",
    ),
    Mistake(
        7,
        "logits of the last tokens of the batch",
        "hidden[batch.output_rows]",
        "hidden[len(hidden) - len(batch.output_rows) :]",
        "test_a_block_may_be_filled_and_read_in_one_step",
    ),
    Mistake(
        8,
        "the token that crosses the threshold is dropped",
        ".sum().clamp(max=len(logits) - 1)",
        ".sum().sub(1).clamp(0, len(logits) - 1)",
        "test_how_many_are_kept",
    ),
    Mistake(
        8,
        "top-p of 0.89 keeps all",
        "border = ordered[last] if top_p < 1 else 0.0",
        "border = ordered[last] if top_p < 0.85 else 0.0",
        "test_how_many_are_kept",
    ),
    Mistake(
        8,
        "top-k is forgotten",
        "return (logits >= kth) & (probs >= border)",
        "return probs >= border",
        "test_how_many_are_kept",
    ),
    Mistake(
        8,
        "top-k keeps one",
        "kth = logits.topk(min(top_k or len(logits), len(logits))).values[-1]",
        "kth = logits.topk(min(top_k or len(logits), len(logits))).values[0]",
        "test_how_many_are_kept",
    ),
    Mistake(
        8,
        "top-k of 0 is one",
        "top_k or len(logits), len(logits)",
        "top_k or 1, len(logits)",
        "test_how_many_are_kept",
    ),
    Mistake(
        8,
        "top-k of more than there are",
        "logits.topk(min(top_k or len(logits), len(logits)))",
        "logits.topk(top_k or len(logits))",
        "test_how_many_are_kept",
    ),
    Mistake(
        8,
        "top-p over all tokens",
        "logits.masked_fill(logits < kth, -torch.inf).softmax(-1)",
        "logits.softmax(-1)",
        "test_how_many_are_kept",
    ),
    Mistake(
        8,
        "ties are cut",
        "return (logits >= kth) & (probs >= border)",
        (
            "mask = torch.zeros(len(logits), dtype=torch.bool)\n"
            "    mask[logits.topk(min(top_k or len(logits), len(logits))).indices] = True\n"
            "    return mask & (probs >= border)"
        ),
        "test_equal_logits_are_treated_alike",
    ),
    Mistake(
        8,
        "multiplied by the temperature",
        "logits = logits / seq.temperature",
        "logits = logits * seq.temperature",
        "test_draws_have_the_probabilities_of_the_chapter",
    ),
    Mistake(
        8,
        "the caller's logits are changed",
        "logits = logits / seq.temperature",
        "logits /= seq.temperature",
        "test_draws_have_the_probabilities_of_the_chapter",
    ),
    Mistake(
        8,
        "the position of the last token",
        "log_noise(seq.seed, len(seq.token_ids), len(logits))",
        "log_noise(seq.seed, len(seq.token_ids) - 1, len(logits))",
        "test_the_noise_is_that_of_the_position_of_the_new_token",
    ),
    Mistake(
        8,
        "noise is added",
        "logits = logits - log_noise(",
        "logits = logits + log_noise(",
        "test_draws_have_the_probabilities_of_the_chapter",
    ),
    Mistake(
        8,
        "half of the seed is ignored",
        "(seed & 0xFFFFFFFF, seed >> 32, position, 0)",
        "(seed & 0xFFFFFFFF, position, 0)",
        "test_noise_is_exponential_and_a_pure_function",
    ),
    Mistake(
        8,
        "seed and position are added up",
        "(seed & 0xFFFFFFFF, seed >> 32, position, 0)",
        "((seed + position) & 0xFFFFFFFF, seed >> 32, 0)",
        "test_noise_is_exponential_and_a_pure_function",
    ),
    Mistake(
        8,
        "E, not its logarithm",
        ".neg().log1p().neg().log()",
        ".neg().log1p().neg()",
        "test_noise_is_exponential_and_a_pure_function",
    ),
    Mistake(
        8,
        "filtered before the temperature",
        (
            "        logits = logits / seq.temperature\n"
            "        logits = logits.masked_fill(~kept(logits, seq.top_k,"
            " seq.top_p), -torch.inf)\n"
        ),
        (
            "        logits = logits.masked_fill(~kept(logits, seq.top_k,"
            " seq.top_p), -torch.inf)\n"
            "        logits = logits / seq.temperature\n"
        ),
        "test_draws_have_the_probabilities_of_the_chapter",
    ),
    Mistake(
        8,
        "temperature 0 is sampled",
        ("    if seq.temperature > 0:\n        logits = logits / seq.temperature\n"),
        ("    if seq.temperature >= 0:\n        logits = logits / max(seq.temperature, 1)\n"),
        "test_temperature_0_is_the_most_likely",
    ),
    Mistake(
        9,
        "the stop string that begins last",
        "found = min((",
        "found = max((",
        "test_text_up_to_a_stop_string",
    ),
    Mistake(
        9,
        "the stop string is part of the text",
        "return text[: found[0]], found[1]",
        "return text[: found[0] + len(found[1])], found[1]",
        "test_text_up_to_a_stop_string",
    ),
    Mistake(
        9,
        "the shortest beginning is held back",
        "len(text) - max(begun, default=0)",
        "len(text) - min(begun, default=0)",
        "test_text_up_to_a_stop_string",
    ),
    Mistake(
        9,
        "nothing is held back",
        "len(text) - max(begun, default=0)",
        "len(text)",
        "test_text_up_to_a_stop_string",
    ),
    Mistake(
        9,
        "the end is held back as well",
        "return text if is_over else text[",
        "return text[",
        "test_text_up_to_a_stop_string",
    ),
    Mistake(
        9,
        "a prompt that leaves no room is accepted",
        "0 < len(tokens) < self.max_len",
        "0 < len(tokens) <= self.max_len",
        "test_a_prompt_that_cannot_run_is_rejected",
    ),
    Mistake(
        9,
        "an empty prompt is accepted",
        "0 < len(tokens) < self.max_len",
        "len(tokens) < self.max_len",
        "test_a_prompt_that_cannot_run_is_rejected",
    ),
    Mistake(
        9,
        "a request may become longer than the pool",
        "max_len = min(self.max_len, len(tokens) + max_tokens)",
        "max_len = len(tokens) + max_tokens",
        "test_a_request_ends_where_the_pool_does",
    ),
    Mistake(
        9,
        "only the model limits the length",
        "self.max_len = min(longest, config.num_blocks * config.block_size)",
        "self.max_len = longest",
        "test_a_prompt_that_cannot_run_is_rejected",
    ),
    Mistake(
        9,
        "half a character is returned",
        'self._text(seq).rstrip("\\ufffd")',
        "self._text(seq)",
        "test_characters_are_never_returned_in_halves",
    ),
    Mistake(
        9,
        "half a character at the end is lost",
        ('shown = self._text(seq) if seq.finish_reason else self._text(seq).rstrip("\\ufffd")'),
        'shown = self._text(seq).rstrip("\\ufffd")',
        "test_half_a_character_is_returned_at_the_end",
    ),
    Mistake(
        9,
        "the prompt is part of the text",
        "self.tokenizer.decode(seq.token_ids[seq.num_prompt :])",
        "self.tokenizer.decode(seq.token_ids)",
        "test_it_answers",
    ),
    Mistake(
        9,
        "every piece is the whole text",
        "piece, seq.text = visible[len(seq.text) :], visible",
        "piece, seq.text = visible, visible",
        "test_it_answers",
    ),
    Mistake(
        9,
        "abort changes what has ended",
        ('        if not seq.finish_reason:\n            self.scheduler.finish(seq, "abort")'),
        '        self.scheduler.finish(seq, "abort")',
        "test_an_aborted_request_leaves_nothing",
    ),
    Mistake(
        9,
        "a closed generator goes on",
        ("        finally:\n            self.abort(seq)"),
        ("        finally:\n            pass"),
        "test_closing_the_generator_of_chat_aborts",
    ),
    Mistake(
        9,
        "stop strings end nothing",
        ", is_stopped=self._stops, **sampling)",
        ", **sampling)",
        "test_a_stop_string_ends_the_text_before_it",
    ),
    Mistake(
        9,
        "the question has no turn for the answer",
        "add_generation_prompt=True)",
        "add_generation_prompt=False)",
        "test_chat_renders_the_template",
    ),
    Mistake(
        9,
        "the EOS tokens are not passed on",
        "max_len, self.eos, is_stopped",
        "max_len, is_stopped",
        "test_the_end_of_a_message_ends_the_answer",
    ),
    Mistake(
        9,
        "a stop string is found only at the end",
        "any(stop in self._text(seq) for stop in seq.stop)",
        "any(self._text(seq).endswith(stop) for stop in seq.stop)",
        "test_a_stop_string_ends_the_text_before_it",
    ),
    Mistake(
        9,
        "tokens are drawn for all rows",
        (
            "        sampled = [row.seq for row in plan.rows if row.catches_up]\n"
            "        logits = run"
        ),
        ("        sampled = [row.seq for row in plan.rows]\n        logits = run"),
        "test_requests_that_share_steps_get_what_they_get_alone",
    ),
    Mistake(
        9,
        "a step without rows runs the model",
        ("        if not plan.rows:\n            return {}\n"),
        "",
        "test_an_aborted_request_leaves_nothing",
    ),
    Mistake(
        10,
        "a stop string is found one token late",
        "any(stop in self._text(seq) for stop in seq.stop)",
        (
            "any(stop in self.tokenizer.decode(seq.token_ids[seq.num_prompt : -1])"
            " for stop in seq.stop)"
        ),
        "test_tokens_and_steps_are_nanoserves",
    ),
    Mistake(
        10,
        "the budget is one token less",
        "        plan = Plan(self.config.budget)\n",
        "        plan = Plan(self.config.budget - 1)\n",
        "test_tokens_and_steps_are_nanoserves",
    ),
    Mistake(
        11,
        "no aging",
        " + aging * seq.arrival, seq.arrival)",
        ", seq.arrival)",
        "test_the_order_of_remaining_work_and_arrival",
    ),
    Mistake(
        11,
        "the whole length, not what remains",
        "seq.max_len - seq.num_computed + aging",
        "seq.max_len + aging",
        "test_the_order_of_remaining_work_and_arrival",
    ),
    Mistake(
        11,
        "aging the other way",
        "+ aging * seq.arrival, seq.arrival",
        "- aging * seq.arrival, seq.arrival",
        "test_the_order_of_remaining_work_and_arrival",
    ),
    Mistake(
        11,
        "the longest first",
        "return lambda seq: (seq.max_len - seq.num_computed +",
        "return lambda seq: (seq.num_computed - seq.max_len +",
        "test_the_order_of_remaining_work_and_arrival",
    ),
    Mistake(
        11,
        "first come, first served",
        "        insort(self.waiting, seq, key=self.order)",
        "        self.waiting.append(seq)",
        "test_waiting_sequences_are_in_the_order_of_the_policy",
    ),
    Mistake(
        11,
        "arrivals have no number",
        "        seq.arrival = self.num_arrivals\n",
        "",
        "test_waiting_sequences_are_in_the_order_of_the_policy",
    ),
    Mistake(
        11,
        "the last to arrive is preempted",
        "victim = max(self.running, key=self.order)",
        "victim = self.running[-1]",
        "test_the_longest_running_sequence_is_preempted",
    ),
    Mistake(
        11,
        "the shortest is preempted",
        "victim = max(self.running, key=self.order)",
        "victim = min(self.running, key=self.order)",
        "test_a_removed_row_gives_its_tokens_back",
    ),
    Mistake(
        11,
        "the victim goes to the head",
        "            insort(self.waiting, victim, key=self.order)",
        "            self.waiting.appendleft(victim)",
        "test_a_victim_returns_to_its_place_and_not_to_the_head",
    ),
    Mistake(
        11,
        "the victim queues with the key it had",
        (
            "            victim.num_computed = 0\n"
            "            insort(self.waiting, victim, key=self.order)\n"
        ),
        (
            "            insort(self.waiting, victim, key=self.order)\n"
            "            victim.num_computed = 0\n"
        ),
        "test_it_plans_what_the_engine_plans_with_this_order",
    ),
    Mistake(
        11,
        "the victim's row stays in the plan",
        "            plan.rows = [row for row in plan.rows if row.seq is not victim]\n",
        "",
        "test_a_removed_row_gives_its_tokens_back",
    ),
    Mistake(
        11,
        "the victim's tokens stay spent",
        "            plan.budget += sum(row.n for row in plan.rows if row.seq is victim)\n",
        "",
        "test_a_removed_row_gives_its_tokens_back",
    ),
    Mistake(
        11,
        "it preempts itself and goes on",
        ("            if victim is seq:\n                return False\n"),
        "",
        "test_the_victim_may_be_the_sequence_that_needs_the_block",
    ),
    Mistake(
        11,
        "the victim keeps its blocks",
        "            self.blocks.free(victim)\n",
        "",
        "test_a_removed_row_gives_its_tokens_back",
    ),
    Mistake(
        11,
        "the plan does not name the victim",
        "            plan.preempted.append(victim)\n",
        "",
        "test_the_longest_running_sequence_is_preempted",
    ),
    Mistake(
        12,
        "put again is not a use",
        "        self.contents.move_to_end(block_hash)\n",
        "",
        "test_the_host_pool_drops_what_was_put_longest_ago",
    ),
    Mistake(
        12,
        "the newest is dropped",
        "self.contents.popitem(last=False)",
        "self.contents.popitem()",
        "test_the_host_pool_drops_what_was_put_longest_ago",
    ),
    Mistake(
        12,
        "one block too few",
        "while len(self.contents) > self.num_blocks",
        "while len(self.contents) >= self.num_blocks",
        "test_the_host_pool_drops_what_was_put_longest_ago",
    ),
    Mistake(
        12,
        "one block too many",
        "while len(self.contents) > self.num_blocks",
        "while len(self.contents) > self.num_blocks + 1",
        "test_the_host_pool_drops_what_was_put_longest_ago",
    ),
    Mistake(
        12,
        "get counts as a use",
        "        return self.contents[block_hash]\n",
        (
            "        self.contents.move_to_end(block_hash)\n"
            "        return self.contents[block_hash]\n"
        ),
        "test_the_host_pool_drops_what_was_put_longest_ago",
    ),
    Mistake(
        12,
        "a hit of the last token",
        "(len(seq.token_ids) - 1) // self.block_size",
        "len(seq.token_ids) // self.block_size",
        "test_the_last_token_is_never_a_hit",
    ),
    Mistake(
        12,
        "hits behind a gap",
        "takewhile(self.host.__contains__, hashes[len(hits) :])",
        "filter(self.host.__contains__, hashes[len(hits) :])",
        "test_the_first_gap_ends_the_hits",
    ),
    Mistake(
        12,
        "hits of the pool are counted twice",
        "hashes[len(hits) :])]",
        "hashes)]",
        "test_hits_in_the_pool_come_first",
    ),
    Mistake(
        12,
        "the host pool is not searched",
        ("return hits + [HOST for _ in takewhile(self.host.__contains__, hashes[len(hits) :])]"),
        "return hits",
        "test_an_evicted_block_comes_back",
    ),
    Mistake(
        12,
        "contents are read after the allocation",
        "contents = [self.host.get(each) for each in seq.hashes[len(here) : len(hits)]]",
        "contents = (self.host.get(each) for each in seq.hashes[len(here) : len(hits)])",
        "test_a_hit_may_be_displaced_by_what_it_evicts",
    ),
    Mistake(
        12,
        "contents are not written",
        "            self.write(seq.block_table[i], content)\n",
        "            pass\n",
        "test_an_evicted_block_comes_back",
    ),
    Mistake(
        12,
        "contents are written into the wrong block",
        "self.write(seq.block_table[i], content)",
        "self.write(seq.block_table[i - len(here)], content)",
        "test_hits_in_the_pool_come_first",
    ),
    Mistake(
        12,
        "a block with a copy is offloaded",
        "if block_hash and self.blocks_of[block_hash] == [block]:",
        "if block_hash:",
        "test_a_block_with_a_copy_is_not_offloaded",
    ),
    Mistake(
        12,
        "the same content is read again",
        "is_here = block_hash in self.host",
        "is_here = False",
        "test_a_content_is_read_once",
    ),
    Mistake(
        12,
        "the hash is gone when it is needed",
        "        block_hash = self.hash_of.get(block)\n",
        "        block_hash = self.hash_of.pop(block, None)\n",
        "test_an_evicted_block_comes_back",
    ),
    Mistake(
        12,
        "nothing is offloaded",
        (
            "            self.host.put(block_hash, self.host.get(block_hash) if"
            " is_here else self.read(block))\n"
        ),
        "            pass\n",
        "test_an_evicted_block_comes_back",
    ),
    Mistake(
        12,
        "it writes before it knows that there is room",
        (
            "        if not super().allocate(seq, num_tokens, here):\n"
            "            return False\n"
            "        for i, content in enumerate(contents, len(here)):\n"
            "            self.write(seq.block_table[i], content)\n"
            "        return True"
        ),
        (
            "        fits = super().allocate(seq, num_tokens, here)\n"
            "        for i, content in enumerate(contents, len(here)):\n"
            "            self.write([*seq.block_table, *range(1, 99)][i], content)\n"
            "        return fits"
        ),
        "test_what_does_not_fit_changes_nothing",
    ),
    Mistake(
        12,
        "an allocation that fails counts as a use",
        "        if not super().allocate(seq, num_tokens, here):\n",
        (
            "        for each in seq.hashes[len(here) : len(hits)]:\n"
            "            self.host.put(each, self.host.get(each))\n"
            "        if not super().allocate(seq, num_tokens, here):\n"
        ),
        "test_what_does_not_fit_changes_nothing",
    ),
    Mistake(
        12,
        "a view of the pool is kept, not a copy",
        "return self.pool.kv[:, :, block].clone()",
        "return self.pool.kv[:, :, block]",
        "test_the_engine_reads_a_copy_and_writes_all_of_it",
    ),
    Mistake(
        12,
        "only K comes back",
        "self.pool.kv[:, :, block] = content",
        "self.pool.kv[:, 0, block] = content[:, 0]",
        "test_the_engine_reads_a_copy_and_writes_all_of_it",
    ),
    Mistake(
        12,
        "only the first layer comes back",
        "self.pool.kv[:, :, block] = content",
        "self.pool.kv[0, :, block] = content[0]",
        "test_the_engine_reads_a_copy_and_writes_all_of_it",
    ),
    Mistake(
        13,
        "a pending token is hashed",
        "super().cache(seq, min(num_tokens, len(seq.token_ids) - is_pending(seq)))",
        "super().cache(seq, num_tokens)",
        "test_a_block_is_cached_when_its_last_token_is_known",
    ),
    Mistake(
        13,
        "what is about to end is planned",
        "return 0 if is_about_to_end else super().share(seq, budget)",
        "return super().share(seq, budget)",
        "test_a_sequence_that_is_about_to_end_is_not_planned",
    ),
    Mistake(
        13,
        "no sequence with a pending token is planned",
        "is_about_to_end = is_pending(seq) and len(seq.token_ids) >= seq.max_len",
        "is_about_to_end = is_pending(seq)",
        "test_the_next_step_is_planned_before_the_token_is_known",
    ),
    Mistake(
        13,
        "a victim keeps its pending token",
        ("        for victim in plan.preempted:\n            drop_pending(victim)\n"),
        "",
        "test_a_victim_gets_the_token_that_it_still_awaits",
    ),
    Mistake(
        13,
        "what has ended goes on",
        ("            if seq.finish_reason:\n                continue\n"),
        "",
        "test_the_token_after_the_end_is_discarded",
    ),
    Mistake(
        13,
        "a block with a pending token is never cached",
        (
            "            self.blocks.cache(seq, start + n)  # a token that was"
            " pending is known by now\n"
        ),
        "",
        "test_a_block_is_cached_when_its_last_token_is_known",
    ),
    Mistake(
        13,
        "a chunk has a pending token",
        ("            if catches_up:\n                seq.token_ids.append(PENDING)"),
        "            seq.token_ids.append(PENDING)",
        "test_a_chunk_has_no_pending_token",
    ),
    Mistake(
        13,
        "no pending tokens",
        ("            if catches_up:\n                seq.token_ids.append(PENDING)\n"),
        "",
        "test_the_next_step_is_planned_before_the_token_is_known",
    ),
    Mistake(
        13,
        "tokens for what has ended",
        "for row, token in new if not row.seq.finish_reason]",
        "for row, token in new]",
        "test_the_token_after_the_end_is_discarded",
    ),
    Mistake(
        13,
        "a token is appended after its pending one",
        ("        for row, _ in live:\n            drop_pending(row.seq)\n"),
        "",
        "test_the_next_step_is_planned_before_the_token_is_known",
    ),
    Mistake(
        13,
        "computed tokens are counted twice",
        "row._replace(n=0) for row, _ in live",
        "row for row, _ in live",
        "test_a_victim_gets_the_token_that_it_still_awaits",
    ),
    Mistake(
        13,
        "what has ended keeps its pending token",
        ("        drop_pending(seq)\n        super().finish"),
        "        super().finish",
        "test_finish_leaves_no_pending_token",
    ),
    Mistake(
        13,
        "the device reads the live tokens",
        "token_ids=[*seq.token_ids], block_table=[*seq.block_table])",
        "block_table=[*seq.block_table])",
        "test_tokens_and_texts_are_those_without_it",
    ),
    Mistake(
        13,
        "the device reads the live block table",
        "token_ids=[*seq.token_ids], block_table=[*seq.block_table])",
        "token_ids=[*seq.token_ids])",
        "test_tokens_and_texts_are_those_without_it",
    ),
    Mistake(
        13,
        "the device computes with -1",
        "                row.seq.token_ids[-1] = self.last[owner]",
        "                row.seq.token_ids[-1] = 0",
        "test_tokens_and_texts_are_those_without_it",
    ),
    Mistake(
        13,
        "the loop waits before it plans",
        ("        plan = self.scheduler.schedule()\n        owners"),
        (
            "        if self.in_flight:\n"
            "            self.in_flight[1].result()\n"
            "        plan = self.scheduler.schedule()\n"
            "        owners"
        ),
        "test_a_step_is_planned_while_the_model_computes",
    ),
    Mistake(
        13,
        "the loop waits for the step that it launches",
        ("            self.scheduler.commit(plan)\n            self.in_flight = plan, job\n"),
        (
            "            self.scheduler.commit(plan)\n"
            "            self.in_flight = plan, job\n"
            "            job.result()\n"
        ),
        "test_a_step_is_planned_while_the_model_computes",
    ),
    Mistake(
        13,
        "text for what was aborted",
        ("if row.catches_up and not row.seq.finish_reason]\n        self.scheduler.update"),
        ("if row.catches_up]\n        self.scheduler.update"),
        "test_an_abort_between_two_steps_leaves_nothing",
    ),
    Mistake(
        13,
        "the last step is not collected",
        "        pieces = self._collect()\n",
        "        pieces = self._collect() if job else {}\n",
        "test_a_step_is_planned_while_the_model_computes",
    ),
)
