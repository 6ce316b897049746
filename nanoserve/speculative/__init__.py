"""Speculative decoding: guess tokens, compute them all in one step, keep those that are right.

A step that computes one token of a sequence reads every weight for it; a few tokens more take
little longer. So a proposer guesses what comes next, the row of the sequence ends with its guesses,
and the model's logits behind each of them say whether the next one is right.

**The sampler is the verifier.** A token is a pure function of its logits, its request's settings
and the noise of (seed, position, completion). So each position is sampled as ever, and a guess is
right if it is what the sampler draws there: not more, and not less. What comes out is what would
have come out without guessing, token for token, greedy or at random, whoever guesses. The K and V
of a wrong guess lie behind what counts as computed, and are overwritten before anybody reads them.

`config`: what can be asked for. `ngram`, `suffix`, `draft_model`, `head_proposer`: who guesses.
`goodput`: how many guesses pay, by `step_costs`. `scheduler`, `engine`: a step's guesses, from plan
to tokens.
"""
