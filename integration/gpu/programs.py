"""Programs that a GPU container runs: `programs.py NAME`. Each prints one JSON object and exits 0 if it worked."""
import json
import os
import sys
import time


def context():
    import ctypes
    c = ctypes.CDLL("libcuda.so.1")
    if (r := c.cuInit(0)) != 0:
        raise SystemExit(f"cuInit: {r}")
    device, handle = ctypes.c_int(), ctypes.c_void_p()
    c.cuDeviceGet(ctypes.byref(device), 0)
    if (r := c.cuCtxCreate_v2(ctypes.byref(handle), 0, device)) != 0:
        raise SystemExit(f"cuCtxCreate: {r}")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    c.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return {"total_mib": total.value >> 20, "free_mib": free.value >> 20}


def matmul():
    """Work of eight SGEMM 4096 by replays of a CUDA graph; returns how many it did."""
    import torch
    n = 4096
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = torch.randn(n, n, device="cuda"), torch.randn(n, n, device="cuda")
    c = torch.empty(n, n, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.mm(a, b, out=c)
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        torch.mm(a, b, out=c)

    def work():
        for _ in range(8):
            g.replay()
        torch.cuda.synchronize()
        return 8

    return work


def training():
    """Work of one launch-bound training step with pinned input."""
    import torch
    layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(24)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, 512).pin_memory()

    def work():
        loss = model(x.to("cuda", non_blocking=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        return 1

    return work


WORK = {"graph": matmul, "train": training}


def warm(kind):
    work = WORK[kind]()
    for _ in range(30):
        work()
    return work


def rate(work, seconds):
    done, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        done += work()
    return done / (time.perf_counter() - begin)


def graph(seconds=3.0):
    return {"rate": rate(warm("graph"), seconds), "unit": "matmul/s"}


def train(seconds=3.0):
    return {"rate": rate(warm("train"), seconds), "unit": "steps/s"}


def pinned():
    import torch
    x = torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    x.fill_(3)
    y = x.cuda(non_blocking=True)
    torch.cuda.synchronize()
    z = torch.randn(1 << 24)
    registered = int(torch.cuda.cudart().cudaHostRegister(z.data_ptr(), z.numel() * 4, 0))
    d = z.cuda()
    torch.cuda.synchronize()
    same = abs(float(d.double().sum()) - float(z.double().sum())) < 1e-3
    unregistered = int(torch.cuda.cudart().cudaHostUnregister(z.data_ptr()))
    ok = registered == 0 and unregistered == 0 and same and int(y[12345]) == 3
    return {"ok": ok, "register": registered, "unregister": unregistered}


def managed():
    import cupy as cp
    cp.cuda.set_allocator(cp.cuda.MemoryPool(cp.cuda.malloc_managed).malloc)
    a = cp.arange(1 << 24, dtype=cp.float64)
    return {"ok": float(a.sum()) == float((1 << 24) * ((1 << 24) - 1) // 2)}


def cupy():
    import cupy as cp
    a = cp.random.rand(2048, 2048)
    free, total = cp.cuda.runtime.memGetInfo()
    return {"ok": float((a @ a).sum()) > 0, "total_mib": total >> 20}


def jax():
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp
    a = jnp.ones((2048, 2048))
    return {"ok": float((a @ a).sum()) == 2048.0 ** 3, "device": str(jax.devices()[0])}


def _other(inbox, outbox):
    import torch
    t = inbox.get()
    t += 1
    torch.cuda.synchronize()
    outbox.put("done")
    del t


def ipc():
    import torch
    import torch.multiprocessing as mp
    mp.set_start_method("spawn")
    there, back = mp.Queue(), mp.Queue()
    p = mp.Process(target=_other, args=(there, back))
    p.start()
    t = torch.zeros(1000, device="cuda")
    there.put(t)
    back.get(timeout=60)
    ok = float(t.sum()) == 1000.0
    p.join()
    return {"ok": ok}


def vmm():
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch
    keep = [torch.full((300 << 20,), i, dtype=torch.uint8, device="cuda") for i in range(4)]
    torch.cuda.synchronize()
    return {"ok": [int(t[7]) for t in keep] == [0, 1, 2, 3]}


def oom(hold=0.0):
    """Allocates until refused, then keeps it for `hold` seconds."""
    import torch
    free, total = torch.cuda.mem_get_info()
    keep = []
    try:
        while len(keep) < 4096:
            keep.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
        end = "allocated all"
    except torch.OutOfMemoryError:
        end = "torch.OutOfMemoryError"
    import ctypes
    p = ctypes.c_uint64()
    raw = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(16 << 30))
    time.sleep(hold)
    return {"total_mib": total >> 20, "free_mib": free >> 20, "got_mib": len(keep) * 64, "end": end,
            "cuMemAlloc": raw}


def oom_free():
    """Takes 6 GiB where nothing stops it."""
    import torch
    keep = [torch.empty(512 << 20, dtype=torch.uint8, device="cuda") for _ in range(12)]
    torch.cuda.synchronize()
    return {"got_mib": len(keep) * 512}


def serve(kind, folder):
    """Sets `kind` up once, then measures a stretch for every line (seconds) that comes through the fifo `ask`."""
    work = warm(kind)
    ask, answer = open(f"{folder}/ask"), open(f"{folder}/answer", "w", buffering=1)
    for line in ask:
        answer.write(f"{rate(work, float(line))}\n")
    return {}


if __name__ == "__main__":
    name = sys.argv[1]
    started = time.time()
    number = lambda a: float(a) if a.replace(".", "", 1).isdigit() else a
    result = globals()[name](*map(number, sys.argv[2:]))
    print(json.dumps({"program": name, **result, "seconds": round(time.time() - started, 2)}), flush=True)
    sys.exit(0 if result.get("ok", True) else 1)
