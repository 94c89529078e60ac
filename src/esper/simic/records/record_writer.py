"""Writing the records of a run, one file per round."""

from pathlib import Path
from typing import Protocol

import pyarrow

from esper.leyline.disk import replace_synced, sync
from esper.leyline.errors import UsageError
from esper.leyline.notices import notice
from esper.leyline.records import (
    RecordHeader,
    record_files,
    record_folder,
    record_path,
    round_of,
    run_identity,
    sealed_record,
)


class RoundContent(Protocol):
    """What a round has to record."""

    @property
    def round(self) -> int:
        """Number of the round, from 1."""
        ...

    def header(self, run: str) -> RecordHeader:
        """What the record of the run ``run`` says about itself."""
        ...

    def table(self) -> pyarrow.Table:
        """The columns of the record."""
        ...


class RecordWriter:
    """Writes the rounds of a run; when that fails, says so once and writes no more.

    A file gets its name when all of it is on the disk, so a crash leaves whole files only.

    Args:
        run: the run directory.
        last: number of latest records to keep; all if None.
    """

    def __init__(self, run: Path, last: int | None):
        self.run, self.last = run, last
        self._identity = run_identity(run)
        self._failure = False

    def write(self, record: RoundContent) -> None:
        """Write the record of a round, or replace it; then remove those that are too old."""
        if self._failure:
            return
        content = sealed_record(record.table(), record.header(self._identity))
        try:
            folder = record_folder(self.run)
            if not folder.exists():
                folder.mkdir()
                sync(self.run)
            replace_synced(record_path(self.run, record.round), content)
            if self.last is not None:
                for path in record_files(self.run)[: -self.last]:
                    path.unlink(missing_ok=True)
        except OSError as error:
            self._failure = True
            notice(
                f"warning: records: round {record.round} failed ({error.strerror}); "
                "training continues and records no more rounds"
            )


def remove_records_after(run: Path, done: int) -> None:
    """Remove the records of rounds after ``done``, which are run again, and unfinished files.

    Raises:
        UsageError: a file cannot be removed.
    """
    try:
        stale = [path for path in record_files(run) if round_of(path) > done]
        for path in [*stale, *record_folder(run).glob("*.draft")]:
            path.unlink()
    except OSError as error:
        raise UsageError(
            f"resume: cannot remove {error.filename} ({error.strerror}); make it writable"
        ) from error
