"""Event lines of runs as tables of a database, which reads them in batches from Parquet files.

Parts of long runs are read where they are. The other lines are checked one by one and written to
files of the same form in a temporary folder, so that a query of a long run needs no more memory
than one of a short run.
"""

from collections import Counter, defaultdict
from pathlib import Path

import duckdb

from esper.karn.views import event_table, sql_literal
from esper.leyline.events import EVENTS
from esper.leyline.events.part_writer import write_lines
from esper.leyline.events.parts import DamagedPart, check_part, parts_of
from esper.leyline.notices import notice


class EventTables:
    """The lines of runs: the view ``event_lines``, and over it one table per kind of event.

    Args:
        folder: a folder for lines that are in no part.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, list[Path]] = defaultdict(list)
        self._damage: Counter[str] = Counter()

    def add(self, run: Path, name: str) -> None:
        """Add the lines that a run has now; a damaged part is left out, with one line on stderr.

        Args:
            run: its directory.
            name: its name in the column ``run``.

        Raises:
            OSError: the file has vanished, or the folder is full.
        """
        files = self._files[name]
        with (run / "events.jsonl").open("rb") as file:
            for part in parts_of(run, file):
                try:
                    check_part(part)
                except DamagedPart as error:
                    notice(f"warning: {error}; its events are left out")
                    self._damage[name] += 1
                else:
                    # A link, whose name means nothing else to the database.
                    link = self._new_file()
                    link.symlink_to(part.path.absolute())
                    files.append(link)
            file.seek(0)
            target = self._new_file()
            write_lines(file, target)
            files.append(target)

    def _new_file(self) -> Path:
        return self._folder / f"lines-{len(list(self._folder.iterdir()))}.parquet"

    def register(self, database: duckdb.DuckDBPyConnection) -> None:
        """Create the views.

        Of all files, a query may then read only those of the views, once external access is off.
        """
        paths = ", ".join(_literal(path) for files in self._files.values() for path in files)
        database.execute(f"SET allowed_paths = [{paths}]")
        selections = [_selection(name, files) for name, files in self._files.items() if files]
        none = "SELECT '' AS run, '' AS event_type, '' AS data WHERE false"
        database.execute(f"CREATE VIEW event_lines AS {' UNION ALL '.join(selections or [none])}")
        for kind in EVENTS:
            database.execute(f"CREATE VIEW {kind.lower()} AS {event_table(kind)}")

    def unreadable(self, database: duckdb.DuckDBPyConnection) -> Counter[str]:
        """Number of lines of each run that are no events; a damaged part counts as one."""
        sql = "SELECT run, count(*) FROM event_lines WHERE event_type IS NULL GROUP BY run"
        return self._damage + Counter(dict(database.execute(sql).fetchall()))


def _selection(name: str, files: list[Path]) -> str:
    """SQL that selects the lines of a run in the order in which they were written."""
    paths = ", ".join(map(_literal, files))
    return f"SELECT {sql_literal(name)} AS run, event_type, data FROM read_parquet([{paths}])"


def _literal(path: Path) -> str:
    return sql_literal(str(path))
