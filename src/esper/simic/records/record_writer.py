"""Writing the records of a run, one file per round."""

from pathlib import Path

import esper
from esper.leyline.disk import replace_synced, sync
from esper.leyline.errors import UsageError
from esper.leyline.notices import notice
from esper.leyline.records import (
    FORMAT_VERSION,
    RecordHeader,
    record_files,
    record_folder,
    record_path,
    round_of,
    run_identity,
    sealed_record,
)
from esper.simic.records.record_columns import RoundRecord, current_layout, record_table


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

    def write(self, record: RoundRecord) -> None:
        """Write the record of a round, or replace it; then remove those that are too old."""
        if self._failure:
            return
        content = sealed_record(record_table(record), self._header(record))
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

    def _header(self, record: RoundRecord) -> RecordHeader:
        steps, count = record.rollout.actions.shape[:2]
        return RecordHeader(
            format=FORMAT_VERSION,
            run=self._identity,
            round=record.round,
            policy=record.policy,
            episodes=count,
            steps=steps,
            tasks=record.recorded_tasks,
            layout=current_layout(),
            esper=esper.__version__,
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
