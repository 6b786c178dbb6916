"""The script that every launcher runs on a node: its commands, signals and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from fctune.base.exit_codes import EXIT_CODES, RESTARTED
from fctune.training.env_overrides import resolve_launch
from tests.conftest import ROOT
from tests.ranks import find_port
from tests.sky.task_files import SKY, load
from tests.warm_interpreter import warm_python

TINY = str(ROOT / "configs" / "tiny_lora.yaml")
FULL = str(ROOT / "configs" / "tiny_full.yaml")
SOURCES = ("data.sources.0.path=synthetic:train:100:1", f"model.path={ROOT / 'fctune' / 'assets' / 'tiny_base'}")


def copy_with_recorder(folder: Path) -> Path:
    """Copy the script into a tree whose `tune` records its arguments and exits with a given code; the rest is real."""
    (folder / "sky").mkdir(parents=True)
    script = shutil.copy(ROOT / "sky" / "run_node.sh", folder / "sky")
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    recorder = """#!/usr/bin/env bash
    printf '%s\\0' "$@" > "$RECORD.$SLURM_NODEID$SKYPILOT_NODE_RANK$NODE_RANK"
    [ "$PYTHONSAFEPATH" = 1 ] && ls "${PYTHONPATH%%:*}" > "$RECORD.modules.$SLURM_NODEID$SKYPILOT_NODE_RANK$NODE_RANK"
    if [ -n "$EXIT_JSON" ]; then mkdir -p "$RUN"; printf '{"code": %s}' "$EXIT_JSON" > "$RUN/exit.json"; fi
    exit "${TUNE_CODE:-0}"
    """
    nodes = "#!/usr/bin/env bash\n[ \"$*\" = 'show hostnames node[a-b]' ] && printf '127.0.0.1\\n127.0.0.2\\n'\n"
    for name, text in {
        "tune": recorder,
        "scontrol": nodes,
        "python": f'#!/usr/bin/env bash\nexec {warm_python()} "$@"\n',
    }.items():
        (tools / name).write_text("\n".join(line.strip() for line in text.splitlines()) + "\n")
        (tools / name).chmod(0o755)
    return Path(script)


def environment_of(folder: Path, **more: str) -> dict[str, str]:
    for disk in ("shared", "network"):
        (folder / disk).mkdir(exist_ok=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SKYPILOT_", "SLURM_", "FCTUNE_"))
        and name not in ("RANK", "WORLD_SIZE", "MASTER_PORT", "KUBERNETES_SERVICE_HOST")
    }
    return kept | {
        "CONFIG": TINY,
        "FCTUNE_SHARED": str(folder / "shared"),
        "FCTUNE_NETWORK": str(folder / "network"),
        "RECORD": str(folder / "record"),
        "RUN": str(folder / "shared" / "runs" / "tiny_lora"),
        "SLURM_NODEID": "",
        "SKYPILOT_NODE_RANK": "",
        "NODE_RANK": "",
        "EXIT_JSON": "",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(find_port()),
        **more,
    }


def skip_preflight(script: Path, environment: dict[str, str]) -> None:
    """Replace the preflight of a copied script by its outcome on a fit node: the launch, prepared and written."""
    launch = resolve_launch(Path(environment["CONFIG"]), environment, SOURCES, Path(environment["FCTUNE_SHARED"]))
    launch.prepare()
    known, python = script.with_name("launch"), script.parents[1] / ".venv" / "bin" / "python"
    known.write_text(launch.to_shell(0))
    python.write_text(
        "#!/usr/bin/env bash\n"
        f'if [ "$2" != fctune.cli ]; then exec {warm_python()} "$@"; fi\n'
        'while [ "$1" != --launch ]; do shift; done\n'
        f'cp {known} "$2"\n'
    )


def recorded(folder: Path, node: int | str) -> list[str]:
    return (folder / f"record.{node}").read_text().split("\0")[:-1]


def run(script: Path, environment: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(script), *SOURCES, *overrides], env=environment, capture_output=True, text=True, timeout=120
    )


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


LAUNCHERS = {
    "SkyPilot": (
        {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
        "SKYPILOT_NODE_RANK",
    ),
    "Slurm": ({"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[a-b]", "SLURM_GPUS_ON_NODE": "8"}, "SLURM_NODEID"),
    "neither": ({"NUM_NODES": "2", "MASTER_ADDR": "127.0.0.1"}, "NODE_RANK"),
}


@pytest.mark.parametrize("launcher", ["SkyPilot", pytest.param("Slurm", marks=pytest.mark.slow), "neither"])
def test_each_launcher_results_in_the_same_command(launcher: str, tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    variables, rank = LAUNCHERS[launcher]
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="3", **variables)
    others = {"MASTER_ADDR": ""} if launcher == "Slurm" else {}
    nodes = [
        subprocess.Popen(
            [str(script), *SOURCES, "seed=7"],
            env=environment | others | {rank: str(node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    run_ids: dict[str, str] = {}
    for node, process in enumerate(nodes):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        words = recorded(tmp_path, node)
        assert words[0] == "run"
        assert option(words, "--nnodes") == "2"
        assert option(words, "--node_rank") == str(node)
        assert option(words, "--nproc_per_node") == "3"
        assert option(words, "--rdzv_backend") == "static"  # c10d assigns ranks in the order of arrival
        assert option(words, "--rdzv_endpoint") == f"127.0.0.1:{environment['MASTER_PORT']}"
        assert (tmp_path / f"record.modules.{node}").read_text() == "recipes\n"  # all that ranks import from the clone
        run_id = option(words, "--rdzv_id")
        assert run_id == run_ids.setdefault("both nodes", run_id)
        assert "/" not in run_id, "torchrun names a folder after it"
        assert "recipes/lora_fc_distributed" in words
        assert option(words, "--config") == TINY
        assert "seed=7" in words
        assert f"output_dir={tmp_path}/shared/runs/tiny_lora" in words
        assert "SIGTERM" not in option(words, "--signals-to-handle")
        assert not any(word.startswith("checkpoint.fallback_dir=") for word in words), (
            "each node sees its own disk only"
        )


def test_logs_and_records_are_copied_to_the_nodes_disk(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", EXIT_JSON="0")
    output = Path(environment["RUN"])
    (output / "checkpoints").mkdir(parents=True)
    (output / "export").mkdir()
    (output / "metrics.jsonl").write_text('{"step": 1}\n')
    skip_preflight(script, environment)
    assert run(script, environment).returncode == 0
    mirror = tmp_path / "network" / "logs" / "tiny_lora"
    assert (mirror / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (mirror / "exit.json").read_text() == '{"code": 0}'
    assert (mirror / "node-0.log").is_file()
    assert not (mirror / "checkpoints").exists()
    assert run(script, environment | {"MIRROR_CHECKPOINTS": "1"}).returncode == 0
    assert (mirror / "checkpoints").is_dir()


def test_compiled_kernels_are_kept_with_the_run_for_a_restart_on_another_node(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", EXIT_JSON="75", TUNE_CODE="1")
    output, kernels = Path(environment["RUN"]), tmp_path / "network" / "cache"
    output.mkdir(parents=True)
    (output / "metrics.jsonl").write_text('{"step": 1}\n')
    for name in ("inductor", "triton"):
        (kernels / name).mkdir(parents=True)
        (kernels / name / "kernel").write_text(name)
    assert run(script, environment).returncode == 75

    other = environment | {"FCTUNE_NETWORK": str(tmp_path / "other")}
    (tmp_path / "other").mkdir()
    assert run(script, other).returncode == 75
    for name in ("inductor", "triton"):
        assert (tmp_path / "other" / "cache" / name / "kernel").read_text() == name

    (output / "compiled_kernels.tar").write_text("damaged")
    (tmp_path / "third").mkdir()
    in_pod = {"FCTUNE_NETWORK": str(tmp_path / "third"), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    done = run(script, environment | in_pod)
    assert done.returncode == 75
    assert "compiled again" in done.stdout + done.stderr
    assert not any(word.startswith("checkpoint.fallback_dir=") for word in recorded(tmp_path, ""))


def test_the_config_selects_the_recipe(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    done = run(script, environment_of(tmp_path, CONFIG=FULL, FCTUNE_CPU_RANKS="1"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recipes/full_fc_distributed" in recorded(tmp_path, "")
    assert f"checkpoint.fallback_dir={tmp_path}/network/fallback" in recorded(tmp_path, "")


def test_an_export_that_is_only_on_the_nodes_own_disk_is_not_a_success(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1")
    merged = tmp_path / "network" / "fallback" / "tiny_lora" / "export" / "merged"
    (Path(environment["RUN"]) / "export").mkdir(parents=True)
    skip_preflight(script, environment)
    write_tune(script, f"mkdir -p {merged}; exit 0")
    for link in ("", f"ln -sfn {merged} export/merged; exit 0"):  # a full disk may have no room for the link
        if link:
            write_tune(script, link)
        done = run(script, environment)
        assert done.returncode == 74, done.stdout + done.stderr
        assert f"copy it to another disk: {merged}" in done.stdout
    assert run(script, environment | {"FCTUNE_FALLBACK": str(tmp_path / "network" / "fallback")}).returncode == 0
    assert run(script, environment | {"SLURM_JOB_ID": "41"}).returncode == 0, "no disk is chosen there"


@pytest.mark.sample(2)
@pytest.mark.parametrize(("recorded_code", "code"), [("76", 76), ("75", 75), ("74", 74), ("2", 2), ("", 1), ("0", 1)])
def test_the_exit_code_is_the_one_in_exit_json(recorded_code: str, code: int, tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", EXIT_JSON=recorded_code, TUNE_CODE="1")
    stale = Path(environment["RUN"])
    stale.mkdir(parents=True)
    (stale / "exit.json").write_text('{"code": 75}')  # of an earlier run
    if recorded_code:
        skip_preflight(script, environment)
    done = run(script, environment)
    assert done.returncode == code, done.stdout + done.stderr


def test_the_exit_code_of_a_refused_launch_is_not_that_of_the_run_before(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", TUNE_CODE="1")
    output, tune = Path(environment["RUN"]), script.parents[1] / ".venv" / "bin" / "tune"
    output.mkdir(parents=True)
    (output / "exit.json").write_text('{"code": 74}')
    skip_preflight(script, environment)
    tune.write_text(f"#!/usr/bin/env bash\nprintf '{{\"code\": 2}}' > {output}/not_started.json\nexit 1\n")
    assert run(script, environment).returncode == 2
    assert (output / "exit.json").read_text() == '{"code": 74}'


@pytest.mark.parametrize(("recorded_code", "code"), [("75", 0), ("1", 1)])
def test_a_run_that_is_stopped_for_good_is_not_restarted(recorded_code: str, code: int, tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", EXIT_JSON=recorded_code, TUNE_CODE="1")
    Path(environment["RUN"]).mkdir(parents=True)
    Path(environment["RUN"], "stop-for-good").touch()
    skip_preflight(script, environment)
    done = run(script, environment)
    assert done.returncode == code, done.stdout + done.stderr


ENDED = Path("restarts", "slurm-41.ended")


def read_counts(folder: Path) -> list[tuple[str, str]]:
    """Return the launch and the text of each run's count of restarts."""
    files = sorted((folder / "shared" / "restarts").iterdir())
    return [(file.stem, file.read_text()) for file in files if file.suffix[1:].isdigit()]


def write_tune(script: Path, text: str) -> None:
    """Replace the copied script's `tune`, which fails after running ``text``."""
    (script.parents[1] / ".venv" / "bin" / "tune").write_text(f"#!/usr/bin/env bash\ncd $RUN\n{text}\nexit 1\n")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("code", "kind", "marker"), [(75, "checkpoint", "_SUCCESS"), (76, "elastic-checkpoint", "_ELASTIC_SUCCESS")]
)
def test_restarts_end_when_several_in_a_row_have_saved_no_new_checkpoint(
    code: int, kind: str, marker: str, tmp_path: Path
) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", LAUNCH_ID="sky/job 1", MAX_RESTARTS="1")
    run_dir = Path(environment["RUN"])
    run_dir.mkdir(parents=True)
    skip_preflight(script, environment)
    fails = f"printf '{{\"code\": {code}}}' > exit.json"
    saves = f"mkdir -p checkpoints/{kind}-$STEP; touch checkpoints/{kind}-$STEP/{marker}"
    codes = []
    for step in (0, 8, 8, 16, 0, 0):  # the checkpoint that each start saves, if any
        write_tune(script, f"{fails}\n[ $STEP = 0 ] || {{ {saves}; }}")
        codes.append(run(script, environment | {"STEP": str(step)}).returncode)
    assert codes == [code, code, code, code, code, 1]
    assert read_counts(tmp_path) == [("sky-job-1", "16 2\n")]
    assert len(list((tmp_path / "shared" / "restarts").iterdir())) == 1
    # A launch of its own has attempts of its own, and one that no launcher repeats is not counted.
    assert run(script, environment | {"LAUNCH_ID": "other"}).returncode == code
    assert run(script, environment | {"LAUNCH_ID": ""}).returncode == code
    write_tune(script, "exit 0")
    assert run(script, environment).returncode == 0
    assert [launch for launch, _ in read_counts(tmp_path)] == ["other"]
    assert len(list((tmp_path / "shared" / "restarts").iterdir())) == 1


def test_runs_in_one_allocation_count_their_own_restarts(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", SLURM_JOB_ID="41", MAX_RESTARTS="1")
    Path(environment["RUN"]).mkdir(parents=True)
    skip_preflight(script, environment)
    write_tune(script, "printf '{\"code\": 76}' > exit.json")
    first: tuple[dict[str, str], list[str]] = ({"OUTPUT_DIR": "runs/a"}, [])
    others = [
        ({"OUTPUT_DIR": "runs/b"}, []),
        ({"OUTPUT_DIR": "runs/a", "OVERRIDES": "epochs=2 output_dir=runs/c"}, []),
        ({"OVERRIDES": "output_dir=runs/c"}, ["output_dir=runs/d"]),
        ({"CONFIG": FULL}, []),
    ]
    codes = [run(script, environment | given, *words).returncode for given, words in [first, *others, first]]
    assert codes == [76, 76, 76, 76, 76, 1]
    assert [text for _, text in read_counts(tmp_path)].count("0 1\n") == 4
    # Whatever else is in the command, such as the address of a server that has moved, the run is the same.
    moved = run(script, environment | first[0] | {"OVERRIDES": "epochs=3"}, "grpo.server.url=http://n2:8000")
    assert moved.returncode == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("what", "ended"),
    [
        ('printf \'{"code": 76, "faulty_node": {"rank": 1, "host": "b"}}\' > exit.json', "76 1"),
        ('printf \'{"code": 76, "is_consequence": true}\' > exit.json; '
         '(sleep 2; printf \'{"code": 1}\' > exit.json) > /dev/null 2>&1 &', "1 "),
        ("touch .lock", "76 0"),  # killed after it had begun, maybe before the first step
    ],
    ids=["with a faulty node", "replaced by its cause", "without a record"],
)  # fmt: skip
def test_the_faulty_node_is_named_to_the_batch_script(what: str, ended: str, tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", SLURM_JOB_ID="41")
    Path(environment["RUN"]).mkdir(parents=True)
    skip_preflight(script, environment)
    write_tune(script, what)
    done = run(script, environment)
    assert (tmp_path / "shared" / ENDED).read_text() == f"{ended}\n", done.stdout + done.stderr
    assert done.returncode == int(ended.split()[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("nodes", "does", "code"),
    [
        ("2", "", 76),  # torchrun has not reached the other nodes, or its ranks not each other
        ("2", "touch $FCTUNE_RANKS_MET", 1),
        pytest.param(
            "2", "echo 'import not_installed' > ../../../recipes/lora_fc_distributed.py", 1, marks=pytest.mark.thorough
        ),
        pytest.param("2", "exit 2", 1, marks=pytest.mark.thorough),  # of an option that torchrun does not know
        ("1", "", 1),  # nobody to be lost
    ],
)
def test_a_node_that_is_lost_before_the_ranks_have_met_restarts_the_run(
    nodes: str, does: str, code: int, tmp_path: Path
) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", NUM_NODES=nodes, MASTER_ADDR="head")
    skip_preflight(script, environment)
    Path(environment["RUN"]).mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "lora_fc_distributed.py").touch()
    write_tune(script, does)
    done = run(script, environment)
    assert done.returncode == code, done.stdout + done.stderr


def test_a_stop_request_during_the_preflight_restarts_the_run(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    python = script.parents[1] / ".venv" / "bin" / "python"
    python.write_text("#!/usr/bin/env bash\nkill -USR1 $PPID $$\nsleep 5\n")
    done = run(script, environment_of(tmp_path, FCTUNE_CPU_RANKS="1", SLURM_JOB_ID="41"))
    assert done.returncode == 75, done.stdout + done.stderr
    assert (tmp_path / "shared" / ENDED).read_text() == "75 \n"


def test_ranks_that_the_kernel_killed_for_lack_of_memory_are_not_restarted(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", EVENTS=str(tmp_path / "memory.events"))
    Path(environment["RUN"]).mkdir(parents=True)
    skip_preflight(script, environment)
    awk = script.parents[1] / ".venv" / "bin" / "awk"  # reads a file of the test in place of the container's
    awk.write_text(
        '#!/usr/bin/env bash\n[[ "$2" == /sys/fs/cgroup*/memory.events ]] && exec /usr/bin/awk "$1" "$EVENTS"\n'
    )
    awk.chmod(0o755)
    Path(environment["EVENTS"]).write_text("oom 3\noom_kill 3\noom_group_kill 0\n")
    write_tune(script, "touch .lock")
    assert run(script, environment).returncode == 76, "kills of an earlier start"
    write_tune(script, 'touch .lock; sed -i "s/oom_kill 3/oom_kill 11/" "$EVENTS"')
    killed = run(script, environment)
    assert killed.returncode == 1
    assert "out of memory" in killed.stdout
    # The ranks of another node have seen that these are gone.
    consequence = '{"code": 76, "reason": "another rank", "step": 7, "checkpoint": "c", "is_consequence": true}'
    write_tune(script, f"touch .lock; echo '{consequence}' > exit.json; echo oom_kill 12 > $EVENTS")
    assert run(script, environment).returncode == 1
    ended = json.loads((Path(environment["RUN"]) / "exit.json").read_text())
    assert (ended["code"], ended["step"], ended["checkpoint"], ended["is_out_of_memory"]) == (1, 7, "c", True)
    assert "is_consequence" not in ended


def test_other_nodes_count_and_report_in_place_of_a_head_that_is_killed(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", SLURM_JOB_ID="41", NUM_NODES="2", MASTER_ADDR="head")
    ranks = [{"NODE_RANK": "0"}, {"NODE_RANK": "1"}]
    Path(environment["RUN"]).mkdir(parents=True)
    skip_preflight(script, environment)
    write_tune(script, 'printf \'{"code": 76, "faulty_node": {"rank": 1}}\' > exit.json')
    assert run(script, environment | ranks[1]).returncode == 76
    assert (tmp_path / "shared" / ENDED).read_text() == "76 1\n"
    assert read_counts(tmp_path) == [("slurm-41", "0 1\n")]

    write_tune(script, "printf '{\"code\": 74}' > exit.json")
    assert run(script, environment | ranks[0]).returncode == 74
    assert (tmp_path / "shared" / ENDED).read_text() == "74 \n", "the head knows best"
    write_tune(script, "printf '{\"code\": 76}' > exit.json; touch here.$$; until [ -e here.x ]; do sleep 0.1; done")
    nodes = [subprocess.Popen([str(script), *SOURCES], env=environment | rank) for rank in ranks]
    deadline = time.monotonic() + 60
    while len(list(Path(environment["RUN"]).glob("here.*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    Path(environment["RUN"], "here.x").touch()
    assert [node.wait(60) for node in nodes] == [76, 76]
    assert read_counts(tmp_path) == [("slurm-41", "0 2\n")]
    assert (tmp_path / "shared" / ENDED).read_text() == "76 \n"
    assert len(list((tmp_path / "shared" / "restarts").iterdir())) == 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("code", EXIT_CODES)
def test_a_managed_job_on_slurm_is_set_up_again_only_after_the_codes_that_restart(code: int, tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    shutil.copy(SKY / "setup.sh", script.parent)
    (tmp_path / "tune" / "bin").mkdir(parents=True)
    for name in ("tune", "fctune"):  # of an image, which leaves setup.sh nothing to install
        (tmp_path / "tune" / "bin" / name).write_text("")
        (tmp_path / "tune" / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "41", "SKYPILOT_TASK_ID": "sky/job 1", "NUM_NODES": "2", "MASTER_ADDR": "head"}
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", **job)
    run_dir = Path(environment["RUN"])
    run_dir.mkdir(parents=True)
    skip_preflight(script, environment)
    write_tune(script, "exit 0" if code == 0 else f"printf '{{\"code\": {code}}}' > exit.json")

    def set_up(**more: str) -> subprocess.CompletedProcess[str]:
        paths = f"{tmp_path / 'tune' / 'bin'}:{os.environ['PATH']}"
        command, given = [str(script.with_name("setup.sh"))], environment | {"PATH": paths} | more
        (script.parents[1] / ".venv").rename(tmp_path / "kept")
        try:
            return subprocess.run(command, env=given, capture_output=True, text=True, timeout=60)
        finally:
            (script.parents[1] / ".venv").unlink(missing_ok=True)
            (tmp_path / "kept").rename(script.parents[1] / ".venv")

    assert set_up().returncode == 0
    # The head is killed when the other node has ended, which may not know the run's code.
    assert run(script, environment | {"SKYPILOT_NODE_RANK": "1"}).returncode == code
    assert run(script, environment | {"SKYPILOT_NODE_RANK": "0"}).returncode == code
    done = set_up()
    if code in (0, *RESTARTED):
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1
        assert f"the run has ended with exit code {code}, so it is not started again" in done.stderr
        assert set_up(SKYPILOT_TASK_ID="sky/job 2").returncode == 0
        # The head knows better than a node that was killed.
        write_tune(script, "printf '{\"code\": 76}' > exit.json")
        assert run(script, environment | {"SKYPILOT_NODE_RANK": "1"}).returncode == 76
        assert set_up().returncode == 1
        assert run(script, environment | {"SKYPILOT_NODE_RANK": "0"}).returncode == 76
        assert set_up().returncode == 0


def test_several_tasks_of_srun_on_a_node_are_refused_with_what_to_write(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    step = {"SLURM_JOB_ID": "41", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    step |= {"SLURM_STEP_NUM_TASKS": "16"}
    environment = environment_of(tmp_path, MASTER_ADDR="127.0.0.1", **step)
    first = run(script, environment | {"SLURM_PROCID": "0"})
    assert first.returncode == 2
    assert "srun started this script in 16 tasks on 2 nodes" in first.stderr
    assert "sbatch --nodes=2 sky/slurm/finetune_venv.sbatch, or srun --nodes=2 --ntasks=2 " in first.stderr
    other = run(script, environment | {"SLURM_PROCID": "9"})
    assert (other.returncode, other.stderr) == (2, ""), "it is said once"
    assert not list(tmp_path.glob("record*"))


def test_a_node_that_is_unfit_for_a_run_is_named_to_the_batch_script(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", SLURM_JOB_ID="41")
    (script.parents[1] / ".venv" / "bin" / "python").write_text(
        "#!/usr/bin/env bash\n"
        '[[ "$*" == *"--wait ${PREFLIGHT_WAIT_S:-60} "* ]] || exit 1\n'
        'while [ "$1" != --launch ]; do shift; done\necho "faulty_nodes=\'1 3\'" > "$2"; exit 76\n'
    )
    assert run(script, environment).returncode == 76
    assert run(script, environment | {"PREFLIGHT_WAIT_S": "900", "SLURM_JOB_ID": ""}).returncode == 76
    assert (tmp_path / "shared" / ENDED).read_text() == "76 1 3\n"
    assert read_counts(tmp_path) == [("slurm-41", "0 1\n")]


def test_nothing_starts_on_an_unfit_node_or_with_an_invalid_config(tmp_path: Path) -> None:
    script = copy_with_recorder(tmp_path)
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1")
    unfit = run(script, environment | {"FCTUNE_NETWORK": str(tmp_path / "none")})
    assert unfit.returncode == 1
    assert "none: does not exist" in unfit.stdout
    wrong = run(script, environment, "epochz=1")
    assert wrong.returncode == 2
    assert "did you mean epochs?" in wrong.stderr
    without = run(script, environment | {"FCTUNE_CPU_RANKS": ""})
    assert without.returncode == 1
    assert "set FCTUNE_CPU_RANKS" in without.stderr
    nothing = run(script, environment | {"CONFIG": ""})
    assert nothing.returncode
    assert "usage: CONFIG=" in nothing.stderr
    size = run(script, environment | {"CONFIG": "", "MODEL_SIZE": "13B"})
    assert size.returncode == 2
    assert "MODEL_SIZE=13B: fctune comes with no config for models of this size" in size.stderr
    assert not list(tmp_path.glob("record*"))


def start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Start a real run on one rank, in a separate session, and wait for its first steps."""
    environment = environment_of(folder, FCTUNE_CPU_RANKS="1")
    rows = "data.sources.0.path=synthetic:train:400:1"
    command = [str(ROOT / "sky" / "run_node.sh"), rows, "validation.every=0", "parallel.mode=auto", *overrides]
    with open(folder / "shown.txt", "ab") as shown:
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=shown, stderr=subprocess.STDOUT
        )
    metrics = Path(environment["RUN"]) / "metrics.jsonl"
    deadline = time.monotonic() + 150
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    return process


def end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(150)  # a loaded machine takes a minute to start a run
    finally:
        for left in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
            left.kill()


@pytest.mark.slow
@pytest.mark.parametrize("signaled", ["all", "script"])
def test_a_run_that_is_asked_to_stop_saves_and_resumes(signaled: str, tmp_path: Path) -> None:
    process = start(tmp_path, "epochs=50")
    assert process.poll() is None, (tmp_path / "shown.txt").read_text()[-2000:]
    if signaled == "all":  # Slurm: every process of the job
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            one.send_signal(signal.SIGUSR1)
    else:  # the end of a container: only its first process
        process.send_signal(signal.SIGTERM)
    assert end(process) == 75
    ended = json.loads((tmp_path / "shared" / "runs" / "tiny_lora" / "exit.json").read_text())
    assert "saved" in ended["reason"]
    assert Path(ended["checkpoint"]).is_dir()
    process = start(tmp_path, "epochs=50", f"max_steps={ended['step'] + 3}")
    assert end(process) == 0, (tmp_path / "shown.txt").read_text()[-2000:]
    lines = (tmp_path / "shared" / "runs" / "tiny_lora" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, ended["step"] + 4))
    log = (tmp_path / "shared" / "logs" / "tiny_lora" / "node-0.log").read_text()
    assert f"resuming from {ended['checkpoint']}" in log


@pytest.mark.slow
@pytest.mark.parametrize("node", ["head", "other"])
def test_a_node_that_is_preempted_saves_before_it_ends(node: str, tmp_path: Path) -> None:
    if subprocess.run(["pgrep", "-f", r"sky\.skylet\.skylet|sky/run_node\.sh"], capture_output=True).returncode == 0:
        pytest.skip("another training runs on this machine, which the hook would stop, too")
    home, run = tmp_path / "home", tmp_path / "shared" / "runs" / "tiny_lora"
    home.mkdir()
    (home / "sky_workdir").symlink_to(ROOT)
    process = start(tmp_path, "epochs=50")
    assert process.poll() is None, (tmp_path / "shown.txt").read_text()[-2000:]
    (hook,) = load(SKY / "finetune.yaml")["config"]["hooks"]
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}  # the daemon that runs it has none of the task's
    if node == "head":
        done = subprocess.run(["bash", "-c", hook["run"]], env=environment, capture_output=True, text=True, timeout=150)
    else:  # what preStop does
        stand_in = subprocess.Popen(
            ["sky/preempt.sh", "--on-signal", "sky.skylet.skylet"], cwd=ROOT, env=environment, stdout=subprocess.PIPE
        )
        time.sleep(1)
        found = subprocess.run(["pgrep", "-of", r"sky\.skylet\.skylet"], capture_output=True, text=True)
        assert int(found.stdout) == stand_in.pid
        stand_in.terminate()
        stand_in.wait(150)
    assert process.poll() is not None or process.wait(5) is not None, "it waits for the checkpoint"
    assert process.returncode == 75, done.stdout if node == "head" else ""
    ended = json.loads((run / "exit.json").read_text())
    assert Path(ended["checkpoint"]).is_dir()


@pytest.mark.slow
def test_two_nodes_train_together_and_both_return_the_runs_exit_code(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": "none"}\n')
    environment = environment_of(tmp_path, FCTUNE_CPU_RANKS="1", NUM_NODES="2", MASTER_ADDR="127.0.0.1")
    for source, code in (("synthetic:train:200:1", 0), (str(tmp_path / "bad.jsonl"), 2)):
        command = [str(ROOT / "sky" / "run_node.sh"), f"data.sources.0.path={source}", "max_steps=3", "resume=never"]
        nodes = [
            subprocess.Popen(
                command,
                env=environment | {"NODE_RANK": str(node)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in (0, 1)
        ]
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [code, code], outputs
    assert "bad.jsonl:1" in outputs[0]
