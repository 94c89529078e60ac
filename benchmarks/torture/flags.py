"""Odd values of every flag of every command."""

import os
import random
import signal
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from esper.leyline.config.setting import settings_of
from torture.common import Part, fresh, timed, trained

SECONDS = 60
"""What a command may take up to where its work would begin."""
ODD_TEXTS = (
    *("", "-1", "0", "1", "1.5", "nan", "inf", "-inf", "1e400", "9" * 30, "0x10", "1_0", " 1"),
    *("x" * 5000, "\x1b[2J", "../x", "ünï 文", "\udcff", "[[]]", "{}", "null", "a\nb", "--", "-"),
    *("/dev/null", "/proc/self/mem", ".", "own.py", "runs/honest", "~nobody/x", "true", "%s"),
)


def odd_flags(work: Path, count: int = 2_000) -> Part:
    """Odd values of the flags of every command, up to where its work would begin."""
    import code_audit

    part = Part("odd values of every command's flags")
    with timed(part):
        original = work / "original"
        trained(original / "runs", 1, name="honest", record=True)
        (original / "own.py").write_text(code_audit.MODEL)
        context = get_context("spawn")
        pipe, end = context.Pipe()
        # The commands are cut short in a process of their own.
        process = context.Process(target=_try_all, args=(original, work / "place", count, end))
        process.start()
        end.close()
        outcomes: Counter[str] = pipe.recv()
        part.lost, part.tried = pipe.recv(), sum(outcomes.values())
        process.join()
        part.notes = ", ".join(f"{number:,} {what}" for what, number in sorted(outcomes.items()))
    return part


def _try_all(original: Path, place: Path, count: int, pipe: Any) -> None:
    import code_audit

    code_audit.cut_short()
    signal.signal(signal.SIGALRM, _too_slow)
    outcomes, lost = Counter[str](), list[str]()
    cases = list(code_audit.all_cases(ODD_TEXTS, settings_of))
    for case in random.Random(6).sample(cases, count):
        os.chdir(fresh(original, place))
        signal.alarm(SECONDS)
        words = " ".join(case.arguments)[:200]
        try:
            status = code_audit.run(case.arguments)
        except Exception as error:
            status = -1
            lost.append(ascii(f"{words}: {type(error).__name__}: {error}")[:500])
        finally:
            signal.alarm(0)
        refusals = sum(line.startswith("esper: ") for line in code_audit.ERRORS)
        if status == 2 and refusals != 1:
            lost.append(ascii(f"{words}: {code_audit.ERRORS}")[:500])
        outcomes["refused" if status == 2 else "taken"] += 1
    pipe.send(outcomes)
    pipe.send(lost)


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"takes longer than {SECONDS} s")
