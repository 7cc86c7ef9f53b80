#!/usr/bin/env python3
"""Make the embedded data set from a Debian release's package index: hvd_adaptive/xmc/data/embedded/.

Samples are binary packages, features the words of their long descriptions, labels the packages that they
depend on. The index comes through apt, from the sources that this Debian machine is configured with, into a
temporary folder; no root is needed and the machine's own package lists are not touched. The same index gives
the same file.

    python scripts/make_embedded_data.py                 # fetch, and write the data file and its README.md
    python scripts/make_embedded_data.py --lists FOLDER  # reuse what an earlier run left by --keep FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvd_adaptive.xmc.data.embedded import EMBEDDED_NAME, EMBEDDED_PATH, EmbeddedData, IdRows, pack

MIN_LABEL_ROWS = 5
MIN_WORD_ROWS = 3
TEST_TENTHS = 1
MAX_FILE_BYTES = 5_000_000
APT_HELPER = "/usr/lib/apt/apt-helper"
WORD = re.compile(r"[a-z][a-z0-9+-]*[a-z0-9+]")


class Package(NamedTuple):
    """One sample: a binary package."""

    source: str
    name: str
    words: frozenset[str]
    dependencies: frozenset[str]


class AptLists:
    """Package lists of one release in a folder of their own."""

    def __init__(self, folder: Path, release: str) -> None:
        self._release = release
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._options = [
            *("-o", f"Dir::State::Lists={folder / 'lists'}"),
            *("-o", f"Dir::Cache={folder / 'cache'}"),
            # A container's default image sets this to "none", and the descriptions would be missing.
            *("-o", "Acquire::Languages=en"),
        ]

    def fetch(self) -> None:
        """Download the lists of all configured sources."""
        subprocess.run(["apt-get", *self._options, "update"], check=True, stdout=sys.stderr)

    def read(self, created_by: str) -> str:
        """Return one list of the release's main component: "Packages" or "Translations"."""
        return subprocess.run(
            [APT_HELPER, "cat-file", self._target("$(FILENAME)", created_by)],
            check=True,
            capture_output=True,
            text=True,
            encoding="utf-8",
        ).stdout

    def release_fields(self) -> dict[str, str]:
        """Return the fields of the Release file that say which state of the archive this is."""
        packages = Path(self._target("$(FILENAME)", "Packages"))
        stem = packages.name.partition(f"_dists_{self._release}_")[0]
        text = (packages.parent / f"{stem}_dists_{self._release}_InRelease").read_text(encoding="utf-8")
        fields = dict(re.findall(r"^(Origin|Codename|Version|Date): (.*)$", text, flags=re.MULTILINE))
        fields["Architecture"] = self._target("$(ARCHITECTURE)", "Packages")
        return fields

    def _target(self, field: str, created_by: str) -> str:
        filters = [f"Codename: {self._release}", "Component: main", f"Created-By: {created_by}"]
        found = subprocess.run(
            ["apt-get", *self._options, "indextargets", "--format", field, *filters],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        if len(set(found)) != 1:
            sys.exit(
                f"need one list '{created_by}' of release {self._release}, component main, "
                f"but apt knows {len(set(found))}; "
                "run this on a Debian machine of that release, or name another by --release"
            )
        return found[0]


def paragraphs(text: str) -> Iterator[dict[str, str]]:
    """Split a Debian control file into its paragraphs: field -> value, continuation lines kept."""
    for block in text.split("\n\n"):
        fields = re.findall(r"^([^\s:]+):[ \t]*(.*(?:\n[ \t].*)*)", block, flags=re.MULTILINE)
        if fields:
            yield dict(fields)


def read_packages(index: str, translations: str) -> list[Package]:
    """Join packages and descriptions; sorted by source and name, the first entry of a name counts."""
    descriptions = {
        (fields["Package"], fields["Description-md5"]): fields["Description-en"].partition("\n")[2]
        for fields in paragraphs(translations)
    }
    packages: dict[str, Package] = {}
    for fields in paragraphs(index):
        name = fields["Package"]
        description = descriptions.get((name, fields.get("Description-md5", "")))
        if description is None or name in packages:
            continue
        # "libc6 (>= 2.34), exim4 | mail-transport-agent, python3:any": of alternatives the first.
        depends = (
            re.match(r"[a-z0-9][a-z0-9+.-]*", item.strip()) for item in fields.get("Depends", "").split(",")
        )
        packages[name] = Package(
            source=fields.get("Source", name).split()[0],
            name=name,
            words=frozenset(WORD.findall(description.lower())),
            dependencies=frozenset(match[0] for match in depends if match),
        )
    return sorted(packages.values(), key=lambda package: (package.source, package.name))


def is_test(package: Package) -> bool:
    """Split by source, as the packages of one source often share most of their description."""
    digest = hashlib.sha256(package.source.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 < TEST_TENTHS


def make_data(packages: list[Package]) -> EmbeddedData:
    """Choose labels, samples and words, in this order, by counts in the training split alone."""
    counts = Counter(label for package in packages if not is_test(package) for label in package.dependencies)
    labels = sorted(label for label, count in counts.items() if count >= MIN_LABEL_ROWS)
    label_ids = {label: index for index, label in enumerate(labels)}
    kept = [
        package for package in packages if package.words and not package.dependencies.isdisjoint(label_ids)
    ]
    splits = {
        "train": [package for package in kept if not is_test(package)],
        "test": [package for package in kept if is_test(package)],
    }
    word_counts = Counter(word for package in splits["train"] for word in package.words)
    words = sorted(
        (word for word, count in word_counts.items() if count >= MIN_WORD_ROWS),
        key=lambda word: (-word_counts[word], word),
    )
    word_ids = {word: index for index, word in enumerate(words)}
    return EmbeddedData(
        words={split: id_rows([p.words for p in rows], word_ids) for split, rows in splits.items()},
        labels={split: id_rows([p.dependencies for p in rows], label_ids) for split, rows in splits.items()},
        feature_names=words,
        label_names=labels,
    )


def id_rows(rows: list[frozenset[str]], ids: dict[str, int]) -> IdRows:
    """Translate names to ascending ids, dropping names without an id."""
    translated = [sorted(ids[name] for name in row if name in ids) for row in rows]
    return IdRows(
        np.array([len(row) for row in translated], dtype=np.int64),
        np.array([index for row in translated for index in row], dtype=np.int64),
    )


README = """# {name}: words of Debian package descriptions -> the packages needed

Written by `scripts/make_embedded_data.py`; do not edit by hand.

| | |
|---|---|
| made from | {Origin} {Codename} {Version}, main, {Architecture}: Packages and Translation-en |
| date of the Release file | {Date} |
| packages in the index with a description | {num_packages} |
| train / test samples | {num_train} / {num_test} |
| features (words in at least {min_word_rows} training samples) | {num_words} |
| labels (dependencies of at least {min_label_rows} training samples) | {num_labels} |
| features a sample: median / mean / max | {median:.0f} / {mean:.1f} / {max} |
| labels a sample: mean | {labels_mean:.1f} |
| file | `{file}`, {num_bytes} bytes |
| sha256 | {sha256} |

A sample is a binary package with at least one word and one label. Its features are the words of its long
English description (which words, not how often nor in which order), its labels the packages in its Depends
field, of alternatives the first. The split is by hash of the source package, about 90/10. Values are tf-idf,
computed when the cache is built. The format is described in `__init__.py`.

The most frequent label, {top_label}, is in {top_share:.1%} of the training samples: quote P@3 and P@5 too.

## Origin and licence

The data are facts extracted from the package index of Debian: names of packages, their dependencies, and
which words occur in their descriptions. The descriptions themselves are not in the file; they are part of the
packages' `debian/control` files, belong to the packages' authors, and are under the licences that each
package states in its `debian/copyright`, which meet the Debian Free Software Guidelines, as component main
requires. We know of no separate licence for the index. This extract adds no restriction of its own. Debian is
a registered trademark of Software in the Public Interest, Inc.; Debian neither made nor endorses this file.
"""


def main() -> None:
    """Fetch, convert, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--release", default="bookworm", help="codename of the Debian release (default: bookworm)"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="fetch the lists into this folder and keep them"
    )
    parser.add_argument(
        "--lists", type=Path, metavar="FOLDER", help="use the lists in this folder, fetch nothing"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.lists or arguments.keep or Path(temporary)
        lists = AptLists(folder.resolve(), arguments.release)
        if arguments.lists is None:
            lists.fetch()
        packages = read_packages(lists.read("Packages"), lists.read("Translations"))
        release = lists.release_fields()
    data = make_data(packages)
    content = pack(data)
    if len(content) > MAX_FILE_BYTES:
        sys.exit(f"the file would have {len(content)} bytes, more than {MAX_FILE_BYTES}; raise MIN_WORD_ROWS")
    EMBEDDED_PATH.write_bytes(content)
    lengths = data.words["train"].lengths
    counts = np.bincount(data.labels["train"].ids)
    readme = README.format(
        **release,
        name=EMBEDDED_NAME,
        min_word_rows=MIN_WORD_ROWS,
        min_label_rows=MIN_LABEL_ROWS,
        num_packages=len(packages),
        num_train=len(lengths),
        num_test=len(data.words["test"].lengths),
        num_words=len(data.feature_names),
        num_labels=len(data.label_names),
        median=np.median(lengths),
        mean=lengths.mean(),
        max=lengths.max(),
        labels_mean=data.labels["train"].lengths.mean(),
        file=EMBEDDED_PATH.name,
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        top_label=data.label_names[int(counts.argmax())],
        top_share=counts.max() / len(lengths),
    )
    EMBEDDED_PATH.with_name("README.md").write_text(readme, encoding="utf-8")
    print(f"wrote {EMBEDDED_PATH} ({len(content)} bytes) and README.md beside it")


if __name__ == "__main__":
    main()
