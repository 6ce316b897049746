"""Exercise: when each stage of a pipeline computes, and which layers it has.

`run_pipeline` is a simulator. `durations[i][s]` is how long step i takes in stage s, and the
sequences are divided into `num_groups` groups: step i belongs to group i % num_groups. The rules:

1. A stage computes one step at a time, and the steps in order: 0, 1, 2, ...
2. A step begins in stage s > 0 when it has left stage s - 1. What has left a stage waits in a
   queue without limit, so the stage before may go on.
3. A step needs the tokens that the previous step of its group has sampled: step i begins in stage 0
   only when step i - num_groups has left the last stage.
4. Everything begins as early as these rules allow, the first step at time 0.

Return, for each step, a (begin, end) of each stage.

`bubble` is the fraction of the time in which the stages are idle, over all stages, from time 0 to
the end of the last step.

`share_layers` splits a model with layers of these sizes into stages, in order, each with at least
one layer. The last stage also has the head. The largest stage must be as small as possible; any of
several best splits will do. Return the layers of each stage.

Test it with `pytest -x docs/23-scaling-out/test_exercise.py`.
"""

Spans = list[list[tuple[float, float]]]


def run_pipeline(durations: list[list[float]], num_groups: int) -> Spans:
    raise NotImplementedError


def bubble(spans: Spans) -> float:
    raise NotImplementedError


def share_layers(sizes: list[int], head: int, num_stages: int) -> list[range]:
    raise NotImplementedError
