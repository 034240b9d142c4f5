"""Batches whose server is killed at random moments: the same answers as from a server that is left alone.

    make evidence-batch-kills [ARGS="--seed 7 --resume FILE"]

A round begins with some batches that a paused server has taken in: seeds are drawn, nothing is answered. One copy of
the directory is worked off undisturbed. On the other, server after server is ended by `kill -9`: some before they are
ready, the rest at a random moment after that, until every batch is completed. Each of them is also handed a file, which
must be there later if it was acknowledged. Then both copies must have answered the same lines with the same texts and
tokens, each once. Exit status 1 where they have not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from harness.results import open_document, save
from ropeway.catalog import DEFAULT_MODEL
from support.random_gguf import RandomModel, write_random_gguf

Document = dict[str, Any]

TINY = "tiny"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
START_TIMEOUT_S, ROUND_TIMEOUT_S = 300.0, 3600.0
WORDS = "a rope over the valley carries stones up and people down in every season of each year".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is done with one model. num_kills: at least. num_batches x num_lines: requests of a round. life_s: how long
    a server lives at most once it is ready. start_share: of the servers, those killed before that.
    """

    model: str
    num_kills: int
    num_batches: int
    num_lines: int
    max_tokens: int
    life_s: float
    start_share: float = 0.15
    flags: tuple[str, ...] = ()


PARTS = (
    Part(
        model=TINY,
        num_kills=200,
        num_batches=8,
        num_lines=60,
        max_tokens=120,
        life_s=1.5,
        flags=("--max-num-seqs", "16", "--num-kv-blocks", "256"),
    ),
    Part(
        model=DEFAULT_MODEL,
        num_kills=10,
        num_batches=3,
        num_lines=24,
        max_tokens=64,
        life_s=12.0,
        flags=("--max-num-seqs", "16", "--max-model-len", "1024"),
    ),
)


class Server:
    """A server on a directory of batches; its url once it is ready."""

    def __init__(self, model: str | Path, directory: Path, flags: Sequence[str]) -> None:
        command = [sys.executable, "-m", "ropeway", "serve", str(model), "--port", "0", "--batch-dir", str(directory)]
        self._log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*command, *flags],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.url: str | None = None
        self._has_spoken = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.search(r"at (http://\S+)$", line):
                self.url = match[1]
                self._has_spoken.set()
        self._has_spoken.set()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether it is ready within that time. Raises RuntimeError where it has ended."""
        self._has_spoken.wait(timeout_s)
        if self._has_spoken.is_set() and self.url is None:
            raise RuntimeError(f"the server ended by itself:\n{self.log_tail()}")
        return self.url is not None

    def log_tail(self) -> str:
        """The last it wrote to stderr."""
        self._log.seek(0)
        return self._log.read()[-4000:]

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


def client_of(url: str, timeout_s: float) -> httpx.Client:
    """A client that keeps no connections: on a busy machine it may be slower than the server's patience with idle
    ones.
    """
    return httpx.Client(base_url=url, timeout=timeout_s, limits=httpx.Limits(max_keepalive_connections=0))


@contextmanager
def serving(model: str | Path, directory: Path, flags: Sequence[str]) -> Any:
    """A client of a server that lives as long as the block."""
    server = Server(model, directory, flags)
    try:
        if not server.wait_ready(START_TIMEOUT_S):
            raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S:g} s")
        with client_of(server.url or "", 120) as client:
            yield client
    except BaseException:
        print(server.log_tail(), file=sys.stderr)
        raise
    finally:
        server.end(signal.SIGTERM)


def requests_of(part: Part, rng: random.Random, endpoint: str, prefix: str) -> list[Document]:
    """The lines of one batch: greedy and drawn, with a seed of their own and without, several answers, stop strings."""
    lines = []
    for number in range(part.num_lines):
        text = " ".join(rng.choices(WORDS, k=rng.randint(2, 12)))
        body: Document = {
            "max_tokens": rng.randint(1, part.max_tokens),
            "temperature": rng.choice((0, 0.7, 1, 1)),
            "return_token_ids": True,
        }
        body |= {"messages": [{"role": "user", "content": text}]} if endpoint == CHAT else {"prompt": [text, text]}
        if rng.random() < 0.25:
            body["seed"] = rng.randrange(1 << 32)
        if rng.random() < 0.1:
            body["n"] = 2
        if rng.random() < 0.2:
            body["stop"] = rng.choice("aeinst")
        lines.append({"custom_id": f"{prefix}/{number}", "method": "POST", "url": endpoint, "body": body})
    return lines


def upload(client: httpx.Client, lines: Sequence[Document]) -> str:
    content = "\n".join(json.dumps(line) for line in lines).encode()
    answer = client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    return str(answer.raise_for_status().json()["id"])


def take_in(client: httpx.Client, part: Part, rng: random.Random) -> None:
    """Gives a paused server its batches, and waits until their lines are in the journal."""
    client.post("/pause").raise_for_status()
    for number in range(part.num_batches):
        endpoint = (CHAT, COMPLETIONS)[number % 2]
        file_id = upload(client, requests_of(part, rng, endpoint, f"batch {number}"))
        fields = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        client.post("/v1/batches", json=fields).raise_for_status()
    wait_for(client, {"in_progress"})


def batches(client: httpx.Client) -> list[Document]:
    data: list[Document] = client.get("/v1/batches?limit=100").raise_for_status().json()["data"]
    return data


def wait_for(client: httpx.Client, statuses: set[str]) -> None:
    end_s = time.monotonic() + ROUND_TIMEOUT_S
    while not all(batch["status"] in statuses for batch in batches(client)):
        if time.monotonic() > end_s:
            raise RuntimeError(f"not every batch was {statuses} within {ROUND_TIMEOUT_S:g} s")
        time.sleep(0.1)


def answers(client: httpx.Client) -> dict[str, Any]:
    """custom_id -> what was answered; and how many lines the output files have. Raises where a batch has errors."""
    found: dict[str, Any] = {}
    num_lines = 0
    for batch in batches(client):
        if batch["status"] != "completed" or batch["error_file_id"] is not None:
            raise RuntimeError(f"a batch has not ended well: {batch}")
        content = client.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().content
        for line in map(json.loads, content.splitlines()):
            num_lines += 1
            choices = line["response"]["body"]["choices"]
            found[line["custom_id"]] = [
                (
                    choice.get("text", choice.get("message", {}).get("content")),
                    choice["token_ids"],
                    choice["finish_reason"],
                )
                for choice in choices
            ]
        counts = batch["request_counts"]
        if counts["completed"] != counts["total"] or counts["failed"]:
            raise RuntimeError(f"the counts of a batch do not add up: {batch}")
    return {"by_id": found, "num_lines": num_lines}


class Round:
    """One round of a part, in a directory of its own. number: of the round; it and the seed decide what is asked."""

    def __init__(self, part: Part, model: str | Path, home: Path, seed: int, number: int) -> None:
        self._part, self._model, self._home = part, model, home
        self._rng = random.Random(f"{seed}/{part.model}/{number}")
        self._number = number
        self._files: dict[str, bytes] = {}  # acknowledged, by id
        self._num_files_checked = 0

    def run(self, max_kills: int) -> Document:
        """What happened. max_kills: after so many the servers are left alone."""
        start_s = time.monotonic()
        directory, copy = self._home / "killed", self._home / "alone"
        with serving(self._model, directory, self._part.flags) as client:
            take_in(client, self._part, self._rng)
        shutil.copytree(directory, copy)
        with serving(self._model, copy, self._part.flags) as client:
            wait_for(client, {"completed"})
            alone = answers(client)
        kills: list[Document] = []
        while len(kills) < max_kills:
            kill = self._live(directory)
            if kill is None:
                break
            kills.append(kill)
        with serving(self._model, directory, self._part.flags) as client:
            wait_for(client, {"completed"})
            disturbed = answers(client)
            self._check_files(client)
        differing = sorted(
            name
            for name in alone["by_id"].keys() | disturbed["by_id"].keys()
            if alone["by_id"].get(name) != disturbed["by_id"].get(name)
        )
        num_asked = self._part.num_batches * self._part.num_lines
        return {
            "model": self._part.model,
            "number": self._number,
            "num_kills": len(kills),
            "num_requests": num_asked,
            "num_answered_alone": alone["num_lines"],
            "num_answered": disturbed["num_lines"],
            "num_differing": len(differing),
            "differing": differing[:20],
            "is_same": not differing and alone["num_lines"] == disturbed["num_lines"] == num_asked,
            "num_files_acknowledged": len(self._files),
            "wall_s": round(time.monotonic() - start_s, 1),
            "kills": kills,
        }

    def _live(self, directory: Path) -> Document | None:
        """One server, from its start to its kill; None where every batch was completed first."""
        rng, part = self._rng, self._part
        dies_early = rng.random() < part.start_share
        server = Server(self._model, directory, part.flags)
        start_s = time.monotonic()
        try:
            if dies_early:
                server.wait_ready(rng.uniform(0, part.life_s))
                return {"after_start_s": round(time.monotonic() - start_s, 3), "was_ready": server.url is not None}
            if not server.wait_ready(START_TIMEOUT_S):
                raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S:g} s")
            ready_s = time.monotonic()
            dies_s = ready_s + rng.uniform(0, part.life_s)
            killer = threading.Timer(dies_s - ready_s, server.process.kill)
            killer.start()
            try:
                seen = self._be_a_client(server.url or "", dies_s)
            finally:
                killer.join()
            if seen["statuses"] == {"completed": part.num_batches}:
                return None
            return {"after_ready_s": round(dies_s - ready_s, 3), "was_ready": True, **seen}
        finally:
            server.end(signal.SIGKILL)

    def _be_a_client(self, url: str, dies_s: float) -> Document:
        """Uploads a file and looks at the progress, until the server is gone; what was seen last."""
        seen: Document = {"num_completed": None, "statuses": {}}
        content = self._rng.randbytes(self._rng.randint(1, 20_000))
        try:
            with client_of(url, 30) as client:
                self._check_files(client)
                answer = client.post("/v1/files", files={"file": ("x", content)}, data={"purpose": "batch"})
                self._files[answer.raise_for_status().json()["id"]] = content
                while time.monotonic() < dies_s:
                    found = batches(client)
                    statuses = [batch["status"] for batch in found]
                    seen = {
                        "num_completed": sum(batch["request_counts"]["completed"] for batch in found),
                        "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
                    }
                    if set(statuses) == {"completed"}:
                        break
                    time.sleep(0.05)
        except httpx.TransportError:
            pass  # it was killed
        return seen

    def _check_files(self, client: httpx.Client) -> None:
        """Whatever was acknowledged since this was last asked is there, as it was sent. Raises RuntimeError."""
        for file_id, content in list(self._files.items())[self._num_files_checked :]:
            answer = client.get(f"/v1/files/{file_id}/content")
            if answer.status_code != 200 or answer.content != content:
                raise RuntimeError(f"the file {file_id} was acknowledged and is not there: {answer.status_code}")
            self._num_files_checked += 1


class Experiment:
    """The rounds that a document lacks, saved after each."""

    def __init__(self, document: Document, path: Path) -> None:
        self._document, self._path = document, path

    def run(self, parts: Sequence[Part]) -> bool:
        """Whether every round gave the same answers as undisturbed."""
        rounds, seed = self._document["rounds"], self._document["options"]["seed"]
        with tempfile.TemporaryDirectory(prefix="batch-kills-") as home:
            tiny = write_random_gguf(Path(home) / "tiny.gguf", RandomModel())
            for part in parts:
                model = tiny if part.model == TINY else part.model
                while (num_left := part.num_kills - self._num_kills(part.model)) > 0:
                    number = len([each for each in rounds if each["model"] == part.model])
                    place = Path(home) / f"{part.model}-{number}"
                    rounds.append(Round(part, model, place, seed, number).run(num_left))
                    shutil.rmtree(place)
                    self._sum_up(rounds)
                    self._tell(part, rounds[-1])
        return bool(self._document["is_same"])

    def _num_kills(self, model: str) -> int:
        return sum(each["num_kills"] for each in self._document["rounds"] if each["model"] == model)

    def _sum_up(self, rounds: Sequence[Document]) -> None:
        self._document["is_same"] = all(each["is_same"] for each in rounds)
        self._document["sums"] = {
            model: {
                name: sum(each[name] for each in rounds if each["model"] == model)
                for name in ("num_kills", "num_requests", "num_answered", "num_differing", "num_files_acknowledged")
            }
            for model in dict.fromkeys(each["model"] for each in rounds)
        }
        save(self._path, self._document)

    def _tell(self, part: Part, done: Document) -> None:
        print(
            f"{part.model}: {self._num_kills(part.model)} of {part.num_kills} kills; {done['num_answered']} of "
            f"{done['num_requests']} answered, {done['num_differing']} otherwise than undisturbed, "
            f"{done['wall_s']:.0f} s",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="default: drawn, printed and recorded")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with this result file")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    options = {"seed": seed, "parts": [asdict(part) for part in PARTS]}
    document, path = open_document(args.resume, "batch-kills", options, "rounds")
    print(f"seed {document['options']['seed']}, {path}", flush=True)
    is_same = Experiment(document, path).run(PARTS)
    print(f"{document['sums']}: {'all the same' if is_same else 'NOT the same'}; {path}")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
