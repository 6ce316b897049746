"""A request router of Ray Serve, which routes each call and reports changes of the replicas."""

from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanoserve.serve.replicas.messages import FirstCall, NotThereError


class FleetRouter(RequestRouter):
    """A router that lets each call choose its replica (see `messages.Call.choose`).

    Serve creates a router in every process that has a handle of the replicas, and calls it there,
    in its own thread, so routing involves no other process. It proposes a single replica, because
    Serve would choose the least busy of several. A call without a replica fails at once, because
    Serve routes few calls at a time, and waiting calls would block others from available replicas.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._note_replicas: Callable[[set[str]], None] | None = None

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        call = pending_request.args[0]
        if isinstance(call, FirstCall):
            self._note_replicas = call.note_replicas
            self._report_replicas()
        pending_request.routing_context.should_backoff = True  # before the next attempt
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        name = call.choose(replicas)
        if name is not None:
            return [[replicas[name]]]
        if not pending_request.future.done():
            pending_request.future.set_exception(NotThereError("there is no such replica"))
        return [candidate_replicas]  # not used: Serve finds that the call has already ended

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._report_replicas()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._report_replicas()

    def _report_replicas(self) -> None:
        if self._note_replicas is not None:
            self._note_replicas({replica.unique_id for replica in self.curr_replicas})
