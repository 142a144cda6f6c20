"""The tables of `docs/planning.md`, from what `planning.py` has found."""

from __future__ import annotations

import json
from typing import Any

from planning_cases import CLUSTERS, CONSUMER, RULES, Keys, Rule, Scenario, from_json

MARKS = {
    name: (f"<!-- {name}: benchmarks/planning.py writes from here -->", f"<!-- {name}: to here -->")
    for name in ("scenarios", "rules")
}
Rows = dict[str, dict[str, Any]]


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with its tables written anew."""
    rows: Rows = results["jobs"]
    made = f"{results['date']}, {results['versions']}, {results['machine']}"
    parts = {"scenarios": scenarios(rows, made), "rules": rules(rows)}
    for name, (begin, end) in MARKS.items():
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n{parts[name]}\n{end}{rest.partition(end)[2]}"
    return page


def scenarios(rows: Rows, made: str) -> str:
    lines = [
        "| machine | job | plan | device | host | nvme | step | tokens/s | planned in |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [scenario(one, rows) for one in (*CONSUMER, *CLUSTERS)]
    return "\n".join([*lines, "", f"Made on {made}.", ""])


def scenario(one: Scenario, rows: Rows) -> str:
    row = rows.get(json.dumps(one.keys, sort_keys=True))
    if row is None:
        cells = ["not planned yet", *[""] * 6]
    elif "peak_bytes" not in row:
        cells = [short(row["said"]), *[""] * 5, f"{row['planning_seconds']:.0f} s"]
    else:
        peaks = row["peak_bytes"]
        host = peaks["host"] + peaks["pinned"]
        cells = [
            row["plan"],
            *(gib(count) for count in (peaks["device"], host, peaks["nvme"])),
            seconds(row["step_seconds"]["total"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['planning_seconds']:.0f} s",
        ]
    return f"| {machine(one.keys)} | {one.name} | {' | '.join(cells)} |"


def rules(rows: Rows) -> str:
    lines = ["| rule | comes out | what is planned |", "|---|---|---|"]
    for rule in RULES:
        found = [rows.get(json.dumps(keys, sort_keys=True)) for keys in rule.jobs]
        cells = [
            f"{machine(keys)}, {model(keys)}{more(keys)}: {outcome(row)}"
            for keys, row in zip(rule.jobs, found, strict=True)
        ]
        lines.append(f"| {rule.said} | {comes_out(rule, found)} | {'<br>'.join(cells)} |")
    return "\n".join([*lines, ""])


def comes_out(rule: Rule, rows: list[dict[str, Any] | None]) -> str:
    found = [from_json(row["found"]) for row in rows if row is not None]
    if len(found) < len(rows):
        return ""
    return "yes" if rule.comes_out(*found) else "no"


def outcome(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not planned yet"
    if "peak_bytes" not in row:
        return short(row["said"])
    peaks = row["peak_bytes"]
    missing = row["plain_bytes"] - (row["limits"]["device_bytes"] or row["plain_bytes"])
    said = f"{row['plan']}; {gib(peaks['device'])} on the device, "
    said += f"{seconds(row['step_seconds']['total'])} per step"
    return said + (f" (plain: {missing / row['plain_bytes']:.0%} short)" if missing > 0 else "")


def machine(keys: Keys) -> str:
    words = [keys["gpu"]]
    if keys.get("nnodes", 1) > 1:
        words = [f"{keys['nnodes']} machines of {keys['gpu']}", f"{keys['network']} network"]
    words += [f"{keys['ram']} RAM"] if "ram" in keys else []
    words += [f"{keys['nvme']} disk"] if "nvme" in keys else []
    return ", ".join(words)


def model(keys: Keys) -> str:
    return str(keys["model_name_or_path"]).rpartition("/")[2]


_SAID = {"model_name_or_path", "gpu", "ram", "nvme", "nnodes", "network"}


def more(keys: Keys) -> str:
    """Keys that are in no other words."""
    return "".join(f", {key}: {value}" for key, value in keys.items() if key not in _SAID)


def short(said: str) -> str:
    """The first line of an error, and the first thing that would fit."""
    lines = said.splitlines()
    would = next((line.strip() for line in lines if "would fit" in line), "")
    return f"{lines[0]}; {would}".rstrip("; ").replace("|", "/")


def gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count else ""


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
