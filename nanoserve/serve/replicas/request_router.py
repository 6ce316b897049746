"""Ray Serve's side of routing: what it asks for each call, and when its replicas change."""

from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanoserve.serve.replicas.messages import FirstCall, NotThereError


class FleetRouter(RequestRouter):
    """Goes where each call itself wants to go: see `nanoserve.serve.replicas.messages.Call.choose`.

    Serve makes one of these in every process that has a handle of the replicas, and calls it there,
    in its own thread: no other process is asked. One replica is proposed, and not several of which
    Serve would take the least busy one. A call that has nowhere to go fails at once: Serve works on
    few calls at a time, and those that wait would keep others from replicas that are there.
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
            self._tell()
        pending_request.routing_context.should_backoff = True  # before it asks again
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        name = call.choose(replicas)
        if name is not None:
            return [[replicas[name]]]
        if not pending_request.future.done():
            pending_request.future.set_exception(NotThereError("there is no such replica"))
        return [candidate_replicas]  # none of them is used: Serve sees that the call has ended

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        if self._note_replicas is not None:
            self._note_replicas({replica.unique_id for replica in self.curr_replicas})
