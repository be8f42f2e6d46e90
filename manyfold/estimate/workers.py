"""Who runs the shards of an evaluation: this process, processes of this machine, or a Dask cluster.

The numbers are the same to the last bit, wherever shards run: an episode follows from its seed, and the episodes that
run side by side are decided beforehand.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import cloudpickle
import numpy as np

from manyfold import processes
from manyfold.arrays import Ints, check_number
from manyfold.data.episodes import Episodes
from manyfold.draws import Seeds
from manyfold.estimate.collecting import Job, Keep, Shard, run_shard

SIDE_BY_SIDE = 100  # episodes of a shard at most, where not all can run at once
TRIES = 3  # of a shard whose process was killed


def shards(job: Job, who: Ints, seeds: Seeds, workers: int = 1) -> list[Shard]:
    """All episodes in parts; as many workers as there are have something to do."""
    size = job.env.slots and min(SIDE_BY_SIDE, job.env.slots, -(-len(who) // workers))
    size = size or len(who)
    starts = range(0, len(who), size)
    return [Shard(i, who[first : first + size], seeds[first : first + size]) for i, first in enumerate(starts)]


class Crew:
    """Runs shards; to be used in a `with` block, at whose end its processes end.

    Args:
        workers: processes; 1 is this one. Scripts that want more need the guard `if __name__ == "__main__":`, as
            always with Python's processes.
        dask: the address of a Dask scheduler instead, such as "tcp://127.0.0.1:8786".
    """

    def __init__(self, workers: int = 1, dask: str | None = None) -> None:
        check_number("workers", workers, 1, 10_000)
        self.workers, self.dask, self.interrupted = workers, dask, False
        self.executor: Executor | None = None
        self._client: Any = None

    def __enter__(self) -> "Crew":
        if self.dask:
            self._client = _connect(self.dask)
            self.workers = max(1, sum(self._client.nthreads().values()))
            self.executor = self._client.get_executor(pure=False)
        elif self.workers > 1:
            self.executor = _processes(self.workers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self.executor, ProcessPoolExecutor):
            _end(self.executor, at_once=kind is not None or self.interrupted)
        if self._client is not None:
            self._client.close()

    def run(
        self,
        job: Job,
        parts: Sequence[Shard],
        keep: Keep | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Episodes:
        """All shards, in their order; after Ctrl-C those that had ended, and `interrupted` is true.

        Args:
            keep: sees episodes soon after they have ended; here, at a shard's end, where another machine runs it.
            progress: sees how many episodes have ended.
        """
        found: dict[int, Episodes] = {}
        done = 0
        try:
            for shard, episodes in self._each(job, parts, keep):
                found[shard.number] = episodes
                done += len(episodes.lengths)
                progress(done)
        except KeyboardInterrupt:
            self.interrupted = True  # nobody waits for what still runs
            if not found:
                raise
        return Episodes.join([found[shard.number] for shard in parts if shard.number in found])

    def _each(self, job: Job, parts: Sequence[Shard], keep: Keep | None) -> Iterator[tuple[Shard, Episodes]]:
        if self.executor is None or (self._client is None and len(parts) == 1):
            for shard in parts:
                yield shard, run_shard(job, shard, keep)
            return
        try:
            data = cloudpickle.dumps((job, None if self._client else keep))
        except Exception as error:  # whatever a user's own class raises
            raise ValueError(
                f"the environment or a policy can't be sent to other processes ({' '.join(str(error).split()):.80}); "
                "expected workers=1"
            ) from None
        left = list(parts)
        for attempt in range(TRIES):
            futures: dict[Future[Episodes], Shard] = {}
            try:
                for shard in left:
                    try:
                        futures[self.executor.submit(_remote, data, shard)] = shard
                    except OSError:  # what Python raises where a process has just died and its pipe is being closed
                        raise BrokenProcessPool from None
                for future in as_completed(futures):
                    episodes, shard = future.result(), futures[future]
                    left = [other for other in left if other.number != shard.number]
                    if keep and self._client:
                        keep(shard, np.arange(len(shard.who)), episodes)
                    yield shard, episodes
                return
            except BrokenProcessPool:
                if attempt == TRIES - 1:
                    raise ValueError(
                        f"{job.env.name}: a worker process was killed {TRIES} times; is there enough memory?"
                    ) from None
                _end(self.executor, at_once=True)
                self.executor = _processes(self.workers)
            finally:
                for future in futures:
                    future.cancel()


def _processes(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, processes.context(), _begin)


def _end(executor: Any, at_once: bool) -> None:
    """Also of a process that was started while the executor noticed that another one had died, which it forgets."""
    processes = dict(executor._processes or {})
    if at_once:
        for process in processes.values():
            process.kill()
    executor.shutdown(wait=not at_once, cancel_futures=True)


def _connect(address: str) -> Any:
    try:
        import distributed
    except ModuleNotFoundError:
        raise ValueError("a Dask cluster needs distributed, which is not installed; pip install distributed") from None
    try:
        parsed: Any = distributed.comm.addressing
        parsed.get_address_host_port(address)  # of a wrong one, Client leaves a half behind that complains later
        connect: Any = distributed.Client
        return connect(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{address}: no Dask scheduler answers ({reason:.80}), expected tcp://host:port") from None


def _begin() -> None:
    """Of a worker: Ctrl-C is its parent's, and it ends with it, however that one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


@lru_cache(maxsize=2)
def _job(data: bytes) -> tuple[Job, Keep | None]:
    try:
        return cloudpickle.loads(data)
    except ImportError as error:
        raise ValueError(
            f"a worker can't load the environment or a policy ({error}), expected its modules there"
        ) from None


def _remote(data: bytes, shard: Shard) -> Episodes:
    job, keep = _job(data)
    return run_shard(job, shard, keep)
