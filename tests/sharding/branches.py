"""What devices exchange in a branch of a program."""

from __future__ import annotations

import re

from sharding.collectives import collectives


def exchanges_in_branches(program: str) -> set[str]:
    """Computations of a program that are a conditional's branch, or called by one, and have devices exchange something."""
    bodies = dict(re.findall(r"^%?(\S+) \([^\n]*\{\n(.*?)^\}", program, re.MULTILINE | re.DOTALL))
    named = r"%([\w.-]+)"
    reached = [n for line in program.splitlines() if " conditional(" in line for n in re.findall(named, line) if n in bodies]
    assert reached or " conditional(" not in program
    found = set()
    while reached:
        name = reached.pop()
        if name not in found:
            found.add(name)
            reached += [called for called in re.findall(named, bodies[name]) if called in bodies]
    return {name for name in found if collectives(bodies[name])}
