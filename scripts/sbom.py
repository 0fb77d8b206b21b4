#!/usr/bin/env python3
"""Writes the software bill of materials: CycloneDX JSON of what Stoker and its extras install, from locks/.

The same commit gives the same bytes: nothing is asked of the machine or the time. Hashes are of every file of
a version that the lock admits, whichever a machine takes.

    make sbom
"""

from __future__ import annotations

import re
import sys
import tomllib
import uuid
from pathlib import Path

from cyclonedx.model import (
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parent.parent
SETS = ("base", "postgres", "redis", "train", "torch-cpu", "torch-cuda")
SHA = HashAlgorithm.SHA_256
PINNED = re.compile(r"^(\S+?)==(\S+)(?: ; (.*?))?((?: \\\n    --hash=\S+)+)", re.M)


def main() -> None:
    """Write the file that the first argument names."""
    target = Path(sys.argv[1])
    text = bom()
    if errors := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"error: not valid CycloneDX 1.6: {errors}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n")
    sys.stdout.write(f"{target}\n")


def bom() -> str:
    """Return the document."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stoker = Component(
        type=ComponentType.APPLICATION, name=project["name"], version=project["version"],
        description=project["description"], licenses=[LicenseExpression(project["license"])],
        bom_ref="stoker", purl=PackageURL("pypi", None, project["name"], project["version"]),
    )  # fmt: skip
    texts = {name: (ROOT / f"locks/{name}.txt").read_text() for name in SETS}
    found: dict[str, Component] = {}
    for name, text in texts.items():
        for package, version, marker, hashes in PINNED.findall(text):
            purl = PackageURL("pypi", None, package, version)
            component = found.setdefault(
                purl.to_string(),
                Component(
                    type=ComponentType.LIBRARY, name=package, version=version, purl=purl,
                    bom_ref=purl.to_string(), external_references=[files(purl, hashes)],
                    scope=ComponentScope.REQUIRED if name == "base" else ComponentScope.OPTIONAL,
                ),
            )  # fmt: skip
            component.properties.add(Property(name="stoker:lock", value=name))
            if marker:
                component.properties.add(Property(name="stoker:marker", value=marker))
    # Of the content, so that another content has another number.
    made = Bom(
        components=found.values(),
        serial_number=uuid.uuid5(
            uuid.NAMESPACE_URL, "".join((stoker.version or "", *texts.values()))
        ),
    )
    made.metadata.component = stoker
    made.metadata.timestamp = None
    made.register_dependency(stoker, found.values())
    return JsonV1Dot6(made).output_as_string(indent=2)


def files(package: PackageURL, hashes: str) -> ExternalReference:
    """Return where a package's files are, and their hashes."""
    return ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(str(package)),
        hashes=[
            HashType(alg=SHA, content=digest) for digest in re.findall(r"sha256:(\S+)", hashes)
        ],
    )


if __name__ == "__main__":
    main()
