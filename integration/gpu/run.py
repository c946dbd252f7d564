#!/usr/bin/env python3
"""Real containerd, this shim, real CUDA: the proof on a machine with an NVIDIA GPU. Needs root and Python with PyTorch,
CuPy and JAX on the machine (its own root file system is the containers').

  run.py --bin DIR --debs DIR --out results.jsonl [--only functional,quota,sidebyside,closed,tenant,latency,memory,start,rates]

--bin   containerd-shim-gpuslice-v1, gpuslice-sandbox, gpuslice-scheduler, gpuslice, gpuslice-tenant
--debs  Debian 12 packages of containerd and runc, unpacked into a temporary folder (nothing is installed)

Prints and writes one JSON object a line, the lines of `cargo xtask bench` and `demo` with chip, driver and kernel.
"""
import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
RUNTIME = "io.containerd.gpuslice.v1"
STOCK = "io.containerd.runc.v2"
DEVICES = ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"]


def command(*argv, timeout=120, check=False, **kw):
    p = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, **kw)
    if check and p.returncode:
        raise RuntimeError(f"{argv}: {p.returncode}: {p.stderr or p.stdout}")
    return p


class Report:
    def __init__(self, path):
        smi = command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").stdout.strip()
        chip, driver = [f.strip() for f in smi.splitlines()[0].split(",")]
        self.facts = {"chip": chip, "driver": driver, "kernel": platform.release()}
        self.file = open(path, "a", buffering=1)
        self.failed = 0

    def line(self, **fields):
        text = json.dumps({**fields, **self.facts})
        print(json.dumps(fields), flush=True)
        self.file.write(text + "\n")
        if fields.get("ok") is False:
            self.failed += 1


class Node:
    """A private containerd and scheduler in a temporary folder."""

    def __init__(self, binaries, debs):
        self.dir = tempfile.mkdtemp(prefix="gpuslice-gpu-")
        self.children = []
        for name in os.listdir(debs):
            if name.endswith(".deb") and name.startswith(("containerd_", "runc_")):
                command("dpkg", "-x", os.path.join(debs, name), f"{self.dir}/debs", check=True)
        self.bin = f"{self.dir}/bin"
        os.makedirs(self.bin)
        for name in os.listdir(binaries):
            shutil.copy2(os.path.join(binaries, name), self.bin)
        self.path = f"{self.bin}:{self.dir}/debs/usr/bin:{self.dir}/debs/usr/sbin:" + os.environ["PATH"]
        self.env = {**os.environ, "PATH": self.path}
        self.rootfs = f"{self.dir}/rootfs"
        os.makedirs(self.rootfs)
        command("mount", "--bind", "/", self.rootfs, check=True)
        self.config = f"{self.dir}/config.toml"
        self.run = f"{self.dir}/run"
        with open(self.config, "w") as f:
            f.write(f'run_dir = "{self.run}"\nsandbox = "{self.bin}/gpuslice-sandbox"\n'
                    f'[scheduler]\nsocket = "{self.run}/scheduler.sock"\n')
        with open(f"{self.dir}/containerd.toml", "w") as f:
            f.write(f'version = 2\nroot = "{self.dir}/root"\nstate = "{self.dir}/state"\n'
                    f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
                    f'[grpc]\n  address = "{self.dir}/containerd.sock"\n')
        self.start("containerd", "containerd", "--config", f"{self.dir}/containerd.toml")
        self.scheduler = self.start_scheduler()
        for _ in range(100):
            if self.ctr("version").returncode == 0:
                break
            time.sleep(0.1)

    def start(self, name, *argv):
        log = open(f"{self.dir}/{name}.log", "ab")
        p = subprocess.Popen(argv, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.children.append(p)
        return p

    def start_scheduler(self):
        p = self.start("scheduler", f"{self.bin}/gpuslice-scheduler", "--config", self.config)
        for _ in range(100):
            if os.path.exists(f"{self.run}/scheduler.sock"):
                break
            time.sleep(0.05)
        return p

    def ctr(self, *argv, timeout=120):
        return command("ctr", "--address", f"{self.dir}/containerd.sock", *argv, env=self.env, timeout=timeout)

    def run_argv(self, name, program, slice_=None, stock=False, devices=True, detach=False):
        argv = ["ctr", "--address", f"{self.dir}/containerd.sock", "run", "--rm"]
        if detach:
            argv.remove("--rm")
            argv.append("-d")
        argv += ["--runtime", STOCK if stock else RUNTIME]
        if not stock:
            argv += ["--runtime-config-path", self.config]
        for device in DEVICES if devices else []:
            argv += ["--device", device]
        for key, value in (slice_ or {}).items():
            argv += ["--annotation", f"gpuslice.io/{key}={value}"]
        for mount in ["/usr/local/nvidia", "/tmp", "/dev/shm"]:
            if os.path.ismount(mount) or mount == "/tmp":
                mode = "ro" if mount == "/usr/local/nvidia" else "rw"
                argv += ["--mount", f"type=bind,src={mount},dst={mount},options=rbind:{mode}"]
        for key in ("PATH", "LD_LIBRARY_PATH", "HOME", "PYTHONUNBUFFERED", "CUDA_HOME"):
            if key in os.environ:
                argv += ["--env", f"{key}={os.environ[key]}"]
        return argv + ["--cwd", "/tmp", "--rootfs", self.rootfs, name] + program

    def contain(self, name, program, timeout=120, **kw):
        return command(*self.run_argv(name, program, **kw), env=self.env, timeout=timeout)

    def close(self):
        for _ in range(3):
            tasks = self.ctr("task", "ls", "-q").stdout.split()
            for t in tasks:
                self.ctr("task", "rm", "-f", t)
            for c in self.ctr("container", "ls", "-q").stdout.split():
                self.ctr("container", "rm", c)
        for p in self.children:
            p.send_signal(signal.SIGTERM)
        for p in self.children:
            try:
                p.wait(10)
            except subprocess.TimeoutExpired:
                p.kill()
        command("umount", "-l", self.rootfs)
        if os.environ.get("KEEP"):
            for name in sorted(os.listdir(self.dir)):
                if name.endswith(".log"):
                    shutil.copy2(f"{self.dir}/{name}", os.environ["KEEP"])
        shutil.rmtree(self.dir, ignore_errors=True)


def last_json(text):
    for line in reversed(text.strip().splitlines()):
        try:
            return json.loads(line)
        except ValueError:
            continue
    return None


PROGRAMS = f"{HERE}/programs.py"
SLICE = {"memory-hard": "4Gi"}


def functional(node, report):
    for name in ["context", "graph", "train", "cupy", "jax", "ipc", "pinned", "managed", "vmm"]:
        seconds = ["1"] if name in ("graph", "train") else []
        p = node.contain(f"f-{name}", ["python3", PROGRAMS, name, *seconds], slice_={"memory-hard": "4Gi"})
        result = last_json(p.stdout)
        ok = p.returncode == 0 and result is not None
        if ok and "total_mib" in result:
            ok = result["total_mib"] <= 4096
        report.line(show="program", case=name, ok=ok, result=result,
                    **({} if ok else {"status": p.returncode, "error": (p.stderr or p.stdout)[-600:]}))
    for argv in (["nvidia-smi"], ["nvidia-smi", "-L"], ["nvidia-smi", "-q"]):
        p = node.contain("f-smi", argv, slice_=SLICE)
        ok = p.returncode == 0 and (len(argv) > 1 or "/   4096MiB" in p.stdout)
        report.line(show="program", case=" ".join(argv), ok=ok, status=p.returncode,
                    output=p.stdout if len(argv) == 1 else p.stdout[:400], error=p.stderr[-300:])


def quota(node, report):
    p = node.contain("q-plain", ["python3", PROGRAMS, "oom_free"], stock=True)
    plain = last_json(p.stdout)
    report.line(show="quota", case="control: plain runc takes 6 GiB", ok=bool(plain and plain.get("got_mib", 0) >= 6144),
                result=plain, error=p.stderr[-300:])
    p = node.contain("q-slice", ["python3", PROGRAMS, "oom"], slice_=SLICE)
    r = last_json(p.stdout)
    ok = bool(r and r["total_mib"] <= 4096 and r["end"] == "torch.OutOfMemoryError" and r["cuMemAlloc"] == 2
              and 3072 <= r["got_mib"] <= 4096)
    report.line(show="quota", case="4 GiB", ok=ok, result=r, error=p.stderr[-600:])


def sidebyside(node, report):
    plan = {"s-four": "4Gi", "s-nine": "9Gi"}
    procs = {n: subprocess.Popen(node.run_argv(n, ["python3", PROGRAMS, "oom", "3"], slice_={"memory-hard": q}), env=node.env,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for n, q in plan.items()}
    time.sleep(3)
    status = command(f"{node.bin}/gpuslice", "--config", node.config, "status", env=node.env)
    for n, q in plan.items():
        out, err = procs[n].communicate(timeout=120)
        r, mib = last_json(out), int(q[:-2]) * 1024
        ok = bool(r and mib - 1024 <= r["got_mib"] <= mib and r["total_mib"] <= mib and r["cuMemAlloc"] == 2)
        report.line(show="two tenants", case=q, ok=ok, result=r, error=err[-300:])
    report.line(show="status", ok=status.returncode == 0, output=status.stdout, error=status.stderr[-300:])


def closed(node, report):
    node.scheduler.terminate()
    node.scheduler.wait(10)
    p = node.contain("c-none", ["/bin/true"], slice_=SLICE)
    text = (p.stderr or p.stdout).strip()
    report.line(show="fail closed", ok=p.returncode != 0 and "scheduler.sock" in text, error=text[-400:])
    node.ctr("container", "rm", "c-none")
    node.scheduler = node.start_scheduler()
    p = node.contain("c-again", ["/bin/true"], slice_=SLICE)
    report.line(show="scheduler back", ok=p.returncode == 0, error=p.stderr[-300:])


ATTACKS = ["sizes", "pointers", "files", "handles", "abi32", "x32", "io-uring", "high-bits", "type-bytes", "xfer",
           "swap", "clone"]


def tenant(node, report):
    """The small tenant program on the real driver: ways to have memory, signals during calls, attacks."""
    program = f"/tmp/{os.path.basename(node.dir)}-tenant"
    shutil.copy2(f"{node.bin}/gpuslice-tenant", program)
    for argv in (["info"], ["context"], ["contexts", "3"], ["map", "16M"], ["ipc", "16M"], ["dup", "16M"],
                 ["fork-alloc", "16M"], ["managed", "64M"], ["pinned", "300M"], ["storm", "2000"]):
        p = node.contain("t", [program, *argv], slice_=SLICE)
        report.line(show="tenant", case=" ".join(argv), ok=p.returncode == 0, result=last_json(p.stdout),
                    status=p.returncode, error=p.stderr[-300:])
    for name in ATTACKS:
        p = node.contain("a", [program, "attack", name], slice_=SLICE)
        lines = [json.loads(l) for l in p.stdout.splitlines() if l.startswith("{")]
        # A client made through the transfer command is an ordinary one: unwrapped and allowed.
        reached = [l for l in lines if l.get("reached") and "case" in l and l["case"] != "a client"]
        ok = p.returncode in (0, 10) and len(lines) > 1 and not reached
        report.line(show="attack", case=name, ok=ok, status=p.returncode, cases=len(lines) - 1, reached=reached,
                    error=p.stderr[-300:])
    os.unlink(program)


class Server:
    """A program in a container that measures one stretch whenever told to."""

    def __init__(self, node, name, kind, stock):
        self.dir = tempfile.mkdtemp(prefix=f"gpuslice-{name}-", dir="/tmp")
        os.mkfifo(f"{self.dir}/ask")
        os.mkfifo(f"{self.dir}/answer")
        argv = node.run_argv(name, ["python3", PROGRAMS, "serve", kind, self.dir], stock=stock,
                             slice_=None if stock else {"memory-hard": "8Gi"})
        self.log = open(f"{self.dir}/log", "w+")
        self.process = subprocess.Popen(argv, env=node.env, stdout=self.log, stderr=self.log)
        self.ask = self.opened_for_writing(f"{self.dir}/ask")
        self.answer = open(f"{self.dir}/answer", "r")

    def opened_for_writing(self, path, patience=90):
        """A fifo has no reader until the program is ready; a program that ended never will be."""
        end = time.monotonic() + patience
        while True:
            try:
                fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                os.set_blocking(fifo, True)
                return os.fdopen(fifo, "w", buffering=1)
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    self.log.seek(0)
                    raise RuntimeError(f"the program is not ready: {self.log.read()[-400:]}") from None
                time.sleep(0.05)

    def rate(self, seconds):
        self.ask.write(f"{seconds}\n")
        return float(self.answer.readline())

    def close(self):
        self.ask.close()
        self.process.wait(60)
        shutil.rmtree(self.dir, ignore_errors=True)


def verdict(low, high, goal=99.5):
    """A rate is proven good, proven bad, or not decided by this many measurements."""
    if low >= goal:
        return {"ok": True}
    return {"ok": False} if high < goal else {"undecided": True}


def interleaved(node, number, kind, pairs, seconds):
    """Rates of a plain container and a slice, measured in turn in one pair of processes."""
    plain, sliced = Server(node, f"r-plain-{number}", kind, True), Server(node, f"r-slice-{number}", kind, False)
    plain.rate(0.5), sliced.rate(0.5)
    rates_of = {True: [], False: []}
    for k in range(pairs):
        for stock in (True, False) if k % 2 == 0 else (False, True):
            rates_of[stock].append((plain if stock else sliced).rate(seconds))
    plain.close(), sliced.close()
    return rates_of[True], rates_of[False]


def rates(node, report, pairs, seconds, rounds):
    """D8. Two processes of the same program differ by some percent for as long as they live, and a launch-bound step
    most of all: so each round takes fresh ones, and the interval is that of the rounds."""
    for kind, count in (("graph", 2), ("train", rounds)):
        ratios, a, b = [], [], []
        for number in range(count):
            plain, sliced = interleaved(node, f"{kind}-{number}", kind, max(pairs // count, 2), seconds)
            ratios.append(100 * statistics.fmean(sliced) / statistics.fmean(plain))
            a.append(statistics.fmean(plain))
            b.append(statistics.fmean(sliced))
        mean = statistics.fmean(ratios)
        half = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
        report.line(id="D8", case=kind, value=round(mean, 3), unit="% of plain runc", low=round(mean - half, 3),
                    high=round(mean + half, 3), rounds=[round(r, 2) for r in ratios], rate=round(statistics.fmean(b), 2),
                    baseline=round(statistics.fmean(a), 2), **verdict(mean - half, mean + half))


def latency(node, report, rounds=5):
    """D5 and D7: the tenant times its own calls, in a plain container and in a slice, in turn. What is reported is the
    difference; the time inside the driver is in both, and goes."""
    tenant = f"/tmp/{os.path.basename(node.dir)}-tenant"
    shutil.copy2(f"{node.bin}/gpuslice-tenant", tenant)
    seen = {}
    for _ in range(rounds):
        for stock in (True, False):
            p = node.contain("l", [tenant, "latency", "20000"], stock=stock, slice_=None if stock else SLICE)
            lines = [json.loads(l) for l in p.stdout.splitlines() if l.startswith("{")]
            if not lines:
                report.line(show="latency", ok=False, stock=stock, error=(p.stderr or p.stdout)[-400:])
            for l in lines:
                seen.setdefault(l["case"], {True: [], False: []})[stock].append((l["p50_ns"], l["p99_ns"]))
    for case, by in seen.items():
        for k, name, goal in ((0, "p50", 5), (1, "p99", 20)):
            plain = statistics.median(x[k] for x in by[True])
            sliced = statistics.median(x[k] for x in by[False])
            added = [round((s[k] - p[k]) / 1e3, 2) for p, s in zip(by[True], by[False])]
            if case in ("getppid", "clock"):
                report.line(id="D7", case=f"{case} {name}", value=round(sliced - plain), unit="ns", baseline=plain)
            else:
                report.line(id="D5", case=f"{case} {name}", value=round(statistics.median(added), 2), unit="us",
                            baseline=round(plain / 1e3, 2), rounds=added, goal=goal)
    os.unlink(tenant)


def memory(node, report):
    """E2: resident memory of the shim and the sandbox of one container that has a CUDA context."""
    tenant = f"/tmp/{os.path.basename(node.dir)}-tenant"
    shutil.copy2(f"{node.bin}/gpuslice-tenant", tenant)
    p = node.contain("m", [tenant, "hold", "64M", "6"], detach=True, slice_=SLICE)
    time.sleep(4)
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            name = open(f"/proc/{pid}/cmdline").read().split("\0")[0]
            part = next((x for x in ("containerd-shim-gpuslice-v1", "gpuslice-sandbox") if name.endswith(x)), None)
            if part:
                rollup = dict(l.split(":") for l in open(f"/proc/{pid}/smaps_rollup").read().splitlines()[1:])
                found[part] = [int(rollup[k].split()[0]) for k in ("Rss", "Pss")]
        except (OSError, ValueError):
            continue
    total = sum(x[0] for x in found.values()) / 1024
    report.line(id="E2", case="shim and sandbox of one container, resident", value=round(total, 2), unit="MiB",
                parts_kib={k: {"rss": v[0], "pss": v[1]} for k, v in found.items()}, goal=6,
                ok=len(found) == 2 and total <= 6, error=p.stderr[-300:])
    time.sleep(3)
    node.ctr("task", "rm", "-f", "m")
    node.ctr("container", "rm", "m")
    os.unlink(tenant)


def start(node, report, pairs):
    times = {True: [], False: []}
    for k in range(pairs):
        for stock in (True, False) if k % 2 == 0 else (False, True):
            t = time.perf_counter()
            p = node.contain("e", ["/bin/true"], stock=stock, slice_=None if stock else SLICE)
            if p.returncode == 0:
                times[stock].append(time.perf_counter() - t)
    if all(times.values()):
        a, b = statistics.median(times[True]) * 1e3, statistics.median(times[False]) * 1e3
        report.line(id="E1", case="ctr run /bin/true with a GPU", value=round(b - a, 2), unit="ms over plain runc",
                    baseline=round(a, 2), sliced=round(b, 2), pairs=pairs)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--bin", required=True)
    a.add_argument("--debs", required=True)
    a.add_argument("--out", required=True)
    a.add_argument("--only", default="functional,quota,sidebyside,closed,tenant,latency,memory,start,rates")
    a.add_argument("--pairs", type=int, default=30)
    a.add_argument("--seconds", type=float, default=0.5)
    a.add_argument("--rounds", type=int, default=12, help="pairs of fresh processes for the training step")
    args = a.parse_args()
    if os.geteuid() != 0:
        sys.exit("run.py must run as root: it starts a containerd of its own")
    report = Report(args.out)
    node = Node(args.bin, args.debs)
    try:
        steps = {"functional": lambda: functional(node, report), "quota": lambda: quota(node, report),
                 "sidebyside": lambda: sidebyside(node, report), "closed": lambda: closed(node, report), "tenant": lambda: tenant(node, report),
                 "rates": lambda: rates(node, report, args.pairs, args.seconds, args.rounds),
                 "latency": lambda: latency(node, report), "memory": lambda: memory(node, report), "start": lambda: start(node, report, args.pairs)}
        for name in args.only.split(","):
            try:
                steps[name]()
            except Exception as error:  # one step's failure must not hide the others'
                report.line(show=name, ok=False, error=f"{type(error).__name__}: {error}"[:600])
    finally:
        node.close()
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
