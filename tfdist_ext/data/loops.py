"""`for batch in data`: a loop of one's own that moves the position on and shows how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tfdist_ext.data.reading_errors import data_errors_as_raised
from tfdist_ext.data.shards import Remainder

if TYPE_CHECKING:
    from tfdist_ext.data.sharded import ShardedDataset

__all__ = ["Batches"]


class Batches:
    """The rest of an epoch, batch by batch.

    A batch counts as done when it is handed out: a state that is saved in the body of the loop,
    after the step, goes on behind it.
    """

    def __init__(
        self, data: ShardedDataset, strategy: Any, remainder: Remainder, *, progress: bool
    ):
        self._data = data
        self._strategy = strategy
        self._remainder = remainder
        is_chief = strategy is None or bool(strategy.extended.should_checkpoint)
        self._shows = progress and is_chief

    def __iter__(self) -> Iterator[Any]:
        data = self._data
        epoch = data.place[0]
        batches: Any
        if self._strategy is None:
            batches = data.dataset(remainder=self._remainder)
        else:
            batches = data.distributed(self._strategy, self._remainder)
        bar = self._bar()
        iterator = iter(batches)
        while True:
            try:
                with data_errors_as_raised():
                    batch = next(iterator)
            except StopIteration:
                break
            data.advance(1)
            yield batch
            bar(1)
        bar(0)
        if data.place[0] == epoch:  # only reading could tell that this is its end
            data.end_epoch()

    def _bar(self) -> Callable[[int], None]:
        """What is told of steps, each when it is done; 0 when the epoch is."""
        if not self._shows:
            return lambda more: None
        import keras  # costly, and not everybody shows a bar

        bar = keras.utils.Progbar(self._data.steps)
        done = self._data.steps_behind

        def show(more: int) -> None:
            nonlocal done
            done += more
            if more or bar.target is None:
                bar.update(done, finalize=True if not more else None)

        return show
