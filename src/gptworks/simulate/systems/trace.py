"""What a step allocates and frees, and what a caching allocator makes of it.

A small model whose operations are those of another system runs on meta tensors (no memory, no arithmetic). Every
storage that comes or goes is an event; the events are then played to an allocator that follows the rules of the
system's own one. So the gap between "bytes in tensors" and "bytes taken from the card" is computed, not guessed.
"""

import bisect
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 1 << 20
MARK, SYNC = -1, -2  # sizes that are no sizes: a collective uses the tensor; the host waits for the device
# Launches that a stream takes before the host must wait: forums.developer.nvidia.com/t/.../68937 ("about 1000"),
# stackoverflow.com/questions/53970187.
QUEUE = 1024
Event = tuple[int, int]  # (number of the storage, bytes | 0 when it is freed | MARK | SYNC)


class Recorder(TorchDispatchMode):
    """Notes every storage made and freed while it is on; `peak` is the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.alive: dict[int, int] = {}  # id of the storage -> its number
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if id(storage) in self.alive or not size:
            return
        number = len(self.events)  # unique, as every event has its place
        self.alive[id(storage)] = number
        self.events.append((number, size))
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._gone, id(storage), number, size).atexit = False

    def _gone(self, identity: int, number: int, size: int) -> None:
        del self.alive[identity]
        self.events.append((number, 0))
        self.bytes -= size

    def mark(self, tensor: torch.Tensor) -> None:
        """A collective on another stream uses this tensor."""
        self.events.append((self.alive[id(tensor.untyped_storage())], MARK))

    def synchronize(self) -> None:
        self.events.append((0, SYNC))


class CachingAllocator:
    """Best fit in blocks that are split and merged, never given back unless the card is full.

    `torch`: CUDACachingAllocator of PyTorch 1.8 (c10/cuda/CUDACachingAllocator.cpp): requests rounded to 512 bytes;
    up to 1 MiB from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, above in segments rounded to 2 MiB; a
    block of the large pool is split when more than 1 MiB would be left. When cudaMalloc fails it waits for the device,
    gives back whole free segments and tries again (free_cached_blocks).
    `paddle`: AutoGrowthBestFitAllocator (paddle/fluid/memory/allocation): requests rounded to 256 bytes, segments of
    just the size asked for (FLAGS_auto_growth_chunk_size_in_mb = 0), every remainder is split off.
    A tensor that a collective on another stream uses (ProcessGroupNCCL calls recordStream) is not free for others
    before that stream has passed the point. The host runs ahead of the device, so that is when it next waits for it,
    or when QUEUE more kernels were launched, as a launch blocks while that many are pending. A kernel of the trace is
    an allocation: each writes an output.
    """

    def __init__(self, rules: str = "torch", limit: float = float("inf")) -> None:
        self.torch, self.limit = rules == "torch", limit
        self.free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # small pool or not -> (size, address)
        self.blocks: dict[int, list[Any]] = {}  # address -> [size, used, small, previous, next]
        self.where: dict[int, int] = {}
        self.marked: set[int] = set()
        self.waiting: list[tuple[int, int]] = []  # (launches when it was freed, number)
        self.launches = 0
        self.reserved = self.peak = self.top = self.retries = 0

    def _segment(self, size: int, small: bool) -> int:
        if not self.torch:
            return size
        if small:
            return 2 * MIB
        return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB

    def allocate(self, number: int, size: int) -> None:
        self.launches += 1
        while self.waiting and self.launches - self.waiting[0][0] > QUEUE:
            self.release(self.waiting.pop(0)[1])
        unit = 512 if self.torch else 256
        size = -(-size // unit) * unit
        small = self.torch and size <= MIB
        free = self.free[small]
        place = bisect.bisect_left(free, (size, -1))
        if place < len(free):
            address = free.pop(place)[1]
        else:
            segment = self._segment(size, small)
            if self.reserved + segment > self.limit:
                self.give_back()
                if self.reserved + segment > self.limit:
                    raise MemoryError(f"{segment / MIB:.0f} MiB more than the card has, {self.reserved / MIB:.0f} held")
            address = self.top
            self.top += segment + 1  # the gap keeps segments apart
            self.reserved += segment
            self.peak = max(self.peak, self.reserved)
            self.blocks[address] = [segment, False, small, None, None]
        block = self.blocks[address]
        rest = block[0] - size
        if rest >= unit and (small or not self.torch or rest > MIB):
            after = address + size
            self.blocks[after] = [rest, False, small, address, block[4]]
            if block[4] is not None:
                self.blocks[block[4]][3] = after
            block[0], block[4] = size, after
            bisect.insort(free, (rest, after))
        block[1] = True
        self.where[number] = address

    def release(self, number: int) -> None:
        if number in self.marked:
            self.marked.discard(number)
            self.waiting.append((self.launches, number))
            return
        address = self.where.pop(number)
        block = self.blocks[address]
        free = self.free[block[2]]
        block[1] = False
        before = block[3]
        if before is not None and not self.blocks[before][1]:
            free.remove((self.blocks[before][0], before))
            self._merge(before, address)
            address, block = before, self.blocks[before]
        after = block[4]
        if after is not None and not self.blocks[after][1]:
            free.remove((self.blocks[after][0], after))
            self._merge(address, after)
        bisect.insort(free, (block[0], address))

    def _merge(self, left: int, right: int) -> None:
        gone = self.blocks.pop(right)
        self.blocks[left][0] += gone[0]
        self.blocks[left][4] = gone[4]
        if gone[4] is not None:
            self.blocks[gone[4]][3] = left

    def synchronize(self) -> None:
        waiting, self.waiting = self.waiting, []
        for _, number in waiting:
            self.release(number)

    def give_back(self) -> None:
        self.retries += 1
        self.synchronize()
        for free in self.free.values():
            for size, address in list(free):
                if self.blocks[address][3] is None and self.blocks[address][4] is None:  # a whole segment
                    free.remove((size, address))
                    del self.blocks[address]
                    self.reserved -= size

    def play(self, events: Iterable[Event]) -> float:
        """The mean of what is held from the card over these events: what a look at a random moment finds."""
        total = count = 0
        for number, size in events:
            if size == MARK:
                self.marked.add(number)
            elif size == SYNC:
                self.synchronize()
            elif size:
                self.allocate(number, size)
            else:
                self.release(number)
            total, count = total + self.reserved, count + 1
        return total / max(count, 1)
