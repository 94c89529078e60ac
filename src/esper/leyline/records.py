"""The file format of records: the rollout of one round as one sealed Parquet file.

The seal is the SHA-256 of the whole file, stored in the file's own metadata and computed with 64
zeros in its place. The header names run and round, so that a file in the place of another is
recognised as well. docs/records.md describes the format for other tools.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import pyarrow
import pyarrow.parquet

from esper.leyline.config.setting import shown
from esper.leyline.errors import UsageError
from esper.leyline.notices import notice
from esper.leyline.phases import track

FORMAT_VERSION: Final = 1
"""Version of the file format."""

HEADER_KEY, SEAL_KEY = "esper_record", "esper_sha256"
"""Keys of header and seal in the metadata of a file."""

_BLANK_SEAL = b"0" * 64
# In the footer of a Parquet file a value follows its key after a field header and its length.
_SEAL = re.compile(re.escape(SEAL_KEY.encode()) + rb"\x18\x40([0-9a-f]{64})")
_NAME = re.compile(r"round-(\d{6,})\.parquet")


class DamagedRecord(ValueError):
    """A record differs from what was written; the message says in one line how."""


class Layout(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The meaning of the numbers in observations and actions, in their order.

    Attributes:
        host: names of the host features.
        slots: names of the features of a slot.
        critic: names of the critic's additional features.
        heads: names of the action heads.
        options: names of the options of each head; the slot head has none, because its options are
            the slots of the host.
    """

    host: list[str]
    slots: list[str]
    critic: list[str]
    heads: list[str]
    options: dict[str, list[str]]

    def differences(self, layout: "Layout") -> list[str]:
        """What ``layout`` has and this layout lacks, and vice versa, in words; empty if equal."""
        pairs = [
            ("host feature", self.host, layout.host),
            ("slot feature", self.slots, layout.slots),
            ("critic feature", self.critic, layout.critic),
            ("action head", self.heads, layout.heads),
        ]
        pairs += [
            (f"option of head {head}", self.options.get(head, []), layout.options.get(head, []))
            for head in dict.fromkeys([*self.options, *layout.options])
        ]
        descriptions = (_difference(*pair) for pair in pairs)
        return [what for what in descriptions if what is not None]


def _difference(kind: str, names: list[str], other_names: list[str]) -> str | None:
    if names == other_names:
        return None
    additional = ", ".join(name for name in other_names if name not in names)
    missing = ", ".join(name for name in names if name not in other_names)
    parts = [f"with {kind} {additional}"] if additional else []
    parts += [f"without {kind} {missing}"] if missing else []
    return " and ".join(parts) or f"with another order of every {kind}"


Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class GymLayout(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The meaning of the numbers in observations and actions of a Gymnasium task.

    Attributes:
        gym: id of the environment.
        features: number of features of an observation.
        options: number of options of each action head.
        components: number of components of Box actions.
    """

    gym: str
    features: Size
    options: list[Size]
    components: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class RecordedTask(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A task of a record.

    Attributes:
        task: its name, or that of its family.
        slots: names of the slots of its host.
    """

    task: str
    slots: list[str]


class RecordHeader(msgspec.Struct, kw_only=True, frozen=True):
    """What a record says about itself.

    Attributes:
        format: version of the file format.
        run: identity of the run, see ``run_identity``.
        round: number of the round, from 1.
        policy: name of the policy that acted.
        episodes: number of episodes, one per environment; of a Gymnasium task, of those that end.
        steps: environment steps per environment.
        tasks: the tasks by their own name, such as adaptation:17.
        layout: meaning of observations and actions of growing networks.
        gym: the same of a Gymnasium task.
        esper: version of Esper that wrote the record.
    """

    format: int
    run: str
    round: int
    policy: str
    episodes: int
    steps: int
    tasks: dict[str, RecordedTask]
    esper: str
    layout: Layout | None = None
    gym: GymLayout | None = None


def schema_of(layout: Layout | GymLayout) -> pyarrow.Schema:
    """The columns of a record with a layout."""
    if isinstance(layout, GymLayout):
        return gym_record_schema(layout)
    return record_schema(layout)


def gym_record_schema(layout: GymLayout) -> pyarrow.Schema:
    """The columns of a record of a Gymnasium task; docs/records.md explains each."""
    number, whole, flag = pyarrow.float32(), pyarrow.int32(), pyarrow.bool_()
    choices = [
        ("legal", pyarrow.list_(flag, sum(layout.options))),
        ("actions", pyarrow.list_(whole, len(layout.options))),
    ]
    numbers = [("numbers", pyarrow.list_(number, layout.components))]
    return pyarrow.schema(
        [
            *((name, whole) for name in ("round", "environment", "step")),
            ("observation", pyarrow.list_(number, layout.features)),
            *(choices if layout.options else ()),
            *(numbers if layout.components else ()),
            *((name, number) for name in ("log_prob", "value", "reward")),
            *((name, flag) for name in ("terminated", "truncated", "final")),
        ]
    )


def record_schema(layout: Layout) -> pyarrow.Schema:
    """The columns of a record; docs/records.md explains each."""
    name = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    number, ops, blueprints = pyarrow.float32(), layout.options["op"], layout.options["blueprint"]

    def vector(kind: pyarrow.DataType, length: int) -> pyarrow.DataType:
        return pyarrow.list_(kind, length)

    return pyarrow.schema(
        [
            ("round", pyarrow.int32()),
            ("environment", pyarrow.int32()),
            ("step", pyarrow.int32()),
            ("task", name),
            ("draw", name),
            ("twin", pyarrow.int32()),
            ("host", vector(number, len(layout.host))),
            ("slots", pyarrow.list_(vector(number, len(layout.slots)))),
            ("blueprints", pyarrow.list_(pyarrow.int16())),
            ("critic", vector(number, len(layout.critic))),
            ("legal_ops", pyarrow.list_(vector(pyarrow.bool_(), len(ops)))),
            ("legal_blueprints", pyarrow.list_(vector(pyarrow.bool_(), len(blueprints)))),
            ("actions", vector(pyarrow.int16(), len(layout.heads))),
            ("log_prob", number),
            ("value", number),
            ("reward", number),
            ("terminated", pyarrow.bool_()),
            ("truncated", pyarrow.bool_()),
            ("twin_score", number),
        ]
    )


def record_folder(run: Path) -> Path:
    """The folder of a run's records."""
    return run / "records"


def record_path(run: Path, round_number: int) -> Path:
    """The file of a round."""
    return record_folder(run) / f"round-{round_number:06d}.parquet"


def record_files(run: Path) -> list[Path]:
    """The records of a run in the order of their rounds."""
    folder = record_folder(run)
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=round_of)


def round_of(path: Path) -> int:
    """The round that the name of a record stands for."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def run_identity(run: Path) -> str:
    """The random identity that a run was given when it began; copies of a run share it.

    Raises:
        UsageError: ``run`` is not a run directory, or it is from a version without records.
    """
    path = run / "config.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"records: {run} is not a run directory (it has no config.json)"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"records: {path} holds no id, so the records cannot be checked; give another run"
        ) from error


def sealed_record(table: pyarrow.Table, header: RecordHeader) -> bytes:
    """The content of the file of a record."""
    metadata = {HEADER_KEY: msgspec.json.encode(header), SEAL_KEY: _BLANK_SEAL}
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(
        table.replace_schema_metadata(metadata),
        sink,
        compression="zstd",
        # Only names repeat as whole values; a dictionary of features would cost time and space.
        use_dictionary=["task", "draw"] if header.layout else False,
    )
    content = sink.getvalue().to_pybytes()
    begin, end = _seal_span(content)
    seal = hashlib.sha256(content).hexdigest().encode()
    return content[:begin] + seal + content[end:]


def verified_record(path: Path, identity: str) -> tuple[RecordHeader, bytes]:
    """The header and the content of a record, with its seal, run and round checked.

    Args:
        path: the file.
        identity: identity of the run whose record it should be.

    Raises:
        DamagedRecord: the file differs from what was written, or belongs elsewhere.
        OSError: it cannot be read.
        UsageError: another version of Esper wrote it.
    """
    content = path.read_bytes()
    begin, end = _seal_span(content)
    blank = content[:begin] + _BLANK_SEAL + content[end:]
    if hashlib.sha256(blank).hexdigest().encode() != content[begin:end]:
        raise DamagedRecord("its checksum does not match")
    header = _header(path, content)
    if header.run != identity:
        raise DamagedRecord(f"it belongs to another run, whose id is {shown(header.run)}")
    if header.round != round_of(path):
        raise DamagedRecord(f"it is the record of round {header.round}")
    return header, content


@dataclass(frozen=True, slots=True)
class Record:
    """A record that was read and verified.

    Attributes:
        run: directory of its run.
        path: its file.
        header: what it says about itself.
        content: the bytes of the file.
    """

    run: Path
    path: Path
    header: RecordHeader
    content: bytes


class VerifiedRecords:
    """The records of some runs, read and verified one by one.

    Args:
        runs: run directories; one without records contributes none.
        skip_bad: whether to leave out damaged records. Each is named on stderr, and their number is
            printed at the end.

    Attributes:
        skipped: damaged records that the last iteration has left out so far.
    """

    def __init__(self, runs: Sequence[Path], skip_bad: bool = False):
        self.skip_bad = skip_bad
        self.skipped: list[Path] = []
        self._files = {run: record_files(run) for run in runs}

    def __len__(self) -> int:
        return sum(map(len, self._files.values()))

    def __iter__(self) -> Iterator[Record]:
        """Yield each record, runs as given and rounds in order.

        Raises:
            UsageError: a record is damaged, and ``skip_bad`` is false; or another version of Esper
                wrote it.
        """
        self.skipped = []
        identities = {run: run_identity(run) for run, files in self._files.items() if files}
        paths = [(run, path) for run, files in self._files.items() for path in files]
        for run, path in track(paths, "reading the records", "files"):
            try:
                record = Record(run, path, *verified_record(path, identities[run]))
            except FileNotFoundError:
                continue  # a live run with --record-last has just removed it
            except (DamagedRecord, OSError) as error:
                self._skip(path, error)
            else:
                yield record
        if self.skipped:
            notice(
                f"warning: skipped {len(self.skipped)} of {len(self)} records, which are damaged"
            )

    def _skip(self, path: Path, error: DamagedRecord | OSError) -> None:
        reason = getattr(error, "strerror", None) or error
        if not self.skip_bad:
            raise UsageError(
                f"records: {path} is damaged ({reason}); --skip-bad leaves it out"
            ) from error
        notice(f"warning: skipped {path} ({reason})")
        self.skipped.append(path)


def _seal_span(content: bytes) -> tuple[int, int]:
    """Where the seal begins and ends in the content of a file."""
    matches = list(_SEAL.finditer(content))
    if len(matches) != 1:
        raise DamagedRecord("it has no checksum, so it is cut off or not a record")
    return matches[0].span(1)


def _header(path: Path, content: bytes) -> RecordHeader:
    """The header of a file whose seal is intact.

    Raises:
        DamagedRecord: it is not a record.
        UsageError: another version of Esper wrote it.
    """
    try:
        schema = pyarrow.parquet.read_schema(pyarrow.BufferReader(content))
        fields = json.loads(schema.metadata[HEADER_KEY.encode()])
        version = fields["format"]
    except (pyarrow.ArrowException, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedRecord("it has no header") from error
    if version != FORMAT_VERSION:
        raise UsageError(
            f"records: {path} has format {shown(version)}; this version reads {FORMAT_VERSION}; "
            "use the version that wrote it"
        )
    try:
        header = msgspec.convert(fields, RecordHeader)
    except msgspec.ValidationError as error:
        raise DamagedRecord(f"its header is wrong: {shown(str(error))}") from error
    if (header.layout is None) == (header.gym is None):
        raise DamagedRecord("its header is wrong: it has no layout, or two")
    return header
