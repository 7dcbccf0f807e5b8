"""Which files, which tokens, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from worker.contract.errors import FieldError, PlanRefused
from worker.contract.spec import DataSpec
from worker.corpus import find_files, load_corpus


def refusal(data: DataSpec, cache: Path) -> FieldError:
    with pytest.raises(PlanRefused) as caught:
        load_corpus(data, cache)
    (entry,) = caught.value.errors
    return entry


def test_documents_follow_each_other_with_an_end_mark(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.txt").write_bytes(b"de")
    (tmp_path / "text" / "a.txt").write_bytes(b"abc")
    data = DataSpec(directory=str(tmp_path / "text"), sequence_length=2)
    for _ in range(2):  # the second time from the cache
        corpus = load_corpus(data, tmp_path / "cache")
        assert bytes(np.asarray(corpus.tokens)) == b"abc\0de\0"
        assert (corpus.num_files, corpus.num_samples, corpus.vocab_size) == (2, 3, 256)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_names_that_are_no_unicode_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"abc")
    corpus = load_corpus(DataSpec(directory=str(tmp_path), sequence_length=2), tmp_path / "cache")
    assert bytes(np.asarray(corpus.tokens)) == b"abc\0"
    found = refusal(DataSpec(files=("/proc/self/mem",), sequence_length=2), tmp_path / "cache")
    assert (found.pointer, found.code) == ("/data", "unreadable_path") and "/proc/self/mem" in found.message


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"abc")
    data = DataSpec(files=(str(file),), sequence_length=2)
    first = load_corpus(data, tmp_path / "cache")
    file.write_bytes(b"abcd")
    second = load_corpus(data, tmp_path / "cache")
    assert bytes(np.asarray(second.tokens)) == b"abcd\0"
    assert first.fingerprint != second.fingerprint


def test_the_default_is_the_standard_library_in_a_fixed_order() -> None:
    files, source = find_files(DataSpec(sequence_length=8))
    assert files == sorted(files) and len(files) > 100
    assert {"site-packages", "test"}.isdisjoint(part for file in files for part in file.parts[-4:])
    assert "standard library" in source


def test_files_that_match_twice_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdef")
    data = DataSpec(files=(f"{tmp_path}/*.txt", f"{tmp_path}/a.*"), sequence_length=2)
    assert find_files(data)[0] == [tmp_path / "a.txt"]


def test_missing_paths_are_refused_all_at_once(tmp_path: Path) -> None:
    data = DataSpec(files=(f"{tmp_path}/no*.txt", f"{tmp_path}/nor/*.txt"), sequence_length=2)
    with pytest.raises(PlanRefused) as caught:
        load_corpus(data, tmp_path / "cache")
    assert [(entry.pointer, entry.code) for entry in caught.value.errors] == [
        ("/data/files/0", "missing_path"),
        ("/data/files/1", "missing_path"),
    ]
    assert "no*.txt" in str(caught.value)
    entry = refusal(DataSpec(directory=f"{tmp_path}/absent", sequence_length=2), tmp_path / "cache")
    assert entry.pointer == "/data/directory" and "is no directory" in entry.message


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").touch()
    entry = refusal(DataSpec(directory=str(tmp_path / "text"), sequence_length=2), tmp_path / "cache")
    assert (entry.pointer, entry.code) == ("/data/directory", "empty_corpus")


def test_a_sequence_longer_than_the_corpus_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    entry = refusal(DataSpec(files=(str(tmp_path / "a.txt"),), sequence_length=4), tmp_path / "cache")
    assert (entry.pointer, entry.code) == ("/data/sequence_length", "sequence_too_long")
    assert (
        "found 4" in entry.message
        and "has 4 tokens" in entry.message
        and entry.suggestion == ("Use at most 3, or add text.")
    )


def test_an_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    data = DataSpec(tokenizer=str(tmp_path / "none"), sequence_length=2)
    assert refusal(data, tmp_path / "cache").pointer == "/data/tokenizer"
    (tmp_path / "empty").mkdir()
    data = DataSpec(tokenizer=str(tmp_path / "empty"), sequence_length=2)
    assert "save_pretrained" in str(refusal(data, tmp_path / "cache").suggestion)


@pytest.mark.parametrize("name", ["/" + "x" * 300, "/nul\0byte"])
def test_a_directory_whose_name_no_system_takes(name: str, tmp_path: Path) -> None:
    entry = refusal(DataSpec(directory=name, sequence_length=2), tmp_path / "cache")
    assert (entry.pointer, entry.code) == ("/data/directory", "missing_path")


def test_a_directory_among_the_files_is_called_one(tmp_path: Path) -> None:
    entry = refusal(DataSpec(files=(str(tmp_path),), sequence_length=2), tmp_path / "cache")
    assert entry.pointer == "/data/files/0" and "is a directory" in entry.message
    assert "data.directory" in str(entry.suggestion)
