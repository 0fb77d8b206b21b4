#!/usr/bin/env python3
"""Asks a service of advisories about every locked version, by pip-audit, and gives a verdict.

Exit status: 0 when every package was asked about and none has a known vulnerability, 1 when one has, 3 when
there is no verdict, because the service does not answer or does not know a package. An audit of nothing
never passes.

    make audit
    make audit AUDIT_ARGS="--service osv"
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLEAN, FOUND, NO_VERDICT = 0, 1, 3


@dataclass
class Audit:
    """What was learned, over all files."""

    clean: set[str] = field(default_factory=set)
    vulnerable: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def add(self, reply: dict[str, list[dict]]) -> None:
        """Add the report of one file."""
        for package in reply["dependencies"]:
            if "skip_reason" in package:
                self.unknown.add(package["name"])
                continue
            name = f"{package['name']} {package['version']}"
            if not package["vulns"]:
                self.clean.add(name)
            for advisory in package["vulns"]:
                fixes = ", ".join(advisory["fix_versions"]) or "none yet"
                self.vulnerable.add(f"{name}: {advisory['id']}, fixed in: {fixes}")

    def verdict(self) -> tuple[int, str]:
        """Return the exit status and what to say."""
        if self.vulnerable:
            return FOUND, "\n".join(["vulnerable:", *sorted(self.vulnerable)])
        if self.failures:
            return NO_VERDICT, f"no verdict: the service does not answer\n{self.failures[0]}"
        if self.unknown or not self.clean:
            names = ", ".join(sorted(self.unknown)[:10])
            return NO_VERDICT, (
                f"no verdict: the service does not know {len(self.unknown)} of "
                f"{len(self.unknown) + len(self.clean)} packages\n{names} ..."
            )
        return CLEAN, f"clean: no known vulnerability in {len(self.clean)} packages"


def main() -> None:
    """Audit every file of locks/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--service", choices=("pypi", "osv"), default="pypi")
    parser.add_argument("--osv-url", help="of a mirror of OSV")
    options = parser.parse_args()
    mirror = ["--osv-url", options.osv_url] if options.osv_url else []
    audit = Audit()
    # Advisories are by version, which torch-cuda has as well; the index knows no "+cpu".
    for lock in sorted({*(ROOT / "locks").glob("*.txt")} - {ROOT / "locks/torch-cpu.txt"}):
        command = [
            sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes",
            "--disable-pip", "--vulnerability-service", options.service, "--format", "json",
            "--progress-spinner", "off", *mirror,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            audit.add(json.loads(done.stdout))
        except ValueError:
            audit.failures.append(
                f"{lock.name}: {(done.stderr.strip() or 'no reply').splitlines()[-1]}"
            )
    status, text = audit.verdict()
    sys.stdout.write(f"[audit] {text}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
