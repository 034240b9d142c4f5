"""Every state that three sequences and six blocks of two tokens can reach, under every policy and admission.

    make evidence-exhaustive [ARGS="--resume FILE"]

At each state: the invariants; a plan wherever there is work; no way back to a state, so every path ends; nothing leaks.
See tests/support/exhaustive.py. Arrivals, plans, outcomes of sampling, failures and aborts branch at every point.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from harness.results import open_document, save
from support.exhaustive import BLOCK_SIZE, NUM_BLOCKS, NUM_SEQUENCES, Arrival, Walk, walk
from support.schedulers import ADMISSIONS, POLICIES

ARRIVALS = (Arrival(2, 3), Arrival(5, 2), Arrival(4, 2, is_background=True))
MAX_NUM_SEQS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with this result file")
    args = parser.parse_args()
    options = {
        "num_sequences": NUM_SEQUENCES,
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": MAX_NUM_SEQS,
        "arrivals": [asdict(arrival) for arrival in ARRIVALS],
    }
    document, path = open_document(args.resume, "scheduler-exhaustive", options, "walks")
    walks = document["walks"]
    done = {(each["policy"], each["admission"]) for each in walks}
    print(f"{'policy':>17} {'admission':>22} {'states':>9} {'transitions':>12} {'ends':>7} {'longest':>8} {'s':>7}")
    for policy, make_policy in POLICIES.items():
        for admission, make_admission in ADMISSIONS.items():
            if (policy, admission) in done:
                continue
            start_s = time.monotonic()
            coverage = walk(Walk(make_policy, make_admission, ARRIVALS, MAX_NUM_SEQS, can_fail=False))
            taken_s = round(time.monotonic() - start_s, 1)
            walks.append({"policy": policy, "admission": admission, **asdict(coverage), "wall_s": taken_s})
            print(
                f"{policy:>17} {admission:>22} {coverage.num_states:>9,} {coverage.num_transitions:>12,} "
                f"{coverage.num_ends:>7,} {coverage.longest_path:>8} {taken_s:>7}",
                flush=True,
            )
            document["num_states"] = sum(each["num_states"] for each in walks)
            save(path, document)
    print(f"{document['num_states']:,} states: no deadlock, no livelock, no leak; written to {path}")


if __name__ == "__main__":
    main()
