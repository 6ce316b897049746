"""Run the scheduler against simulated devices, in virtual time.

The engine, its scheduler, block manager and extensions, and the router of replicas are the ones
that serve real requests. Only two things differ: the executor, whose steps take a predicted time,
and the clock, which moves from event to event.

    executor.py    an executor without a model: tokens from scripts, seconds from a `StepTime`
    step_time.py   the time of a step: recorded, constant, or linear in the step's sizes
    fit.py         the coefficients of a linear step time, fitted to measured steps
    gpus.py        the time of a step by the roofline of a GPU, and its memory
    replica.py     one engine in virtual time, step by step or in leaps
    leap.py        many decode steps at once
    replay.py      a recorded trace, computed again: its counts must be equal
    traffic.py     requests: when they arrive, their prompts and their outputs
    sessions.py    chats, agents and batches, whose requests follow each other
    fleet.py       replicas behind the router that serves real replicas
    cells.py       many groups of replicas, in several processes
    pairs.py       prefill and decode on different replicas
    drafts.py      draft tokens that are right with a given chance
    results.py     latencies, throughput and goodput of a simulated run
    real.py        the same traffic on a real engine, measured in the same way
    laboratory.py  a reader's own scheduler classes and extensions, from files
    command.py     `nanoserve simulate`
    planner.py     the fewest replicas within objectives; plan.py is `nanoserve plan`
    tuner.py       successive halving over engine options; tune.py is `nanoserve tune`
"""
