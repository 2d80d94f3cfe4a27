"""python .scratch/speed.py: accuracy, device time by kernel, forward and backward times of variants.

First compiles everything in parallel processes into Triton's cache; then measures in this one.
"""
import itertools, os, subprocess, sys, time
sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..")))
START = time.time()
import torch
import triton
from functools import partial
from path_backend import path_attention
from path_backend.beta import beta_from_logits
from path_backend.kernels import config, frames, launch
from path_backend.testing import make_inputs, relative_error, run
from triton.testing import do_bench

def say(*words): print(f"[{time.time() - START:5.0f}s]", *words, flush=True)

DEFAULT = {n: getattr(config, n) for n in ("CHUNK_OPTIONS", "SWEEP_OPTIONS", "WHOLE_PRODUCTS", "forward_tiles", "query_tiles", "key_tiles")}
T = config.Tiles
VARIANTS = {
    "default": {},
    "regs": dict(CHUNK_OPTIONS={"num_warps": 4}, SWEEP_OPTIONS={"num_warps": 4}),
    "regs128": dict(CHUNK_OPTIONS={"num_warps": 4, "maxnreg": 128}, SWEEP_OPTIONS={"num_warps": 8}),
    "small": dict(WHOLE_PRODUCTS=10**9),
    "stages": dict(forward_tiles=lambda d, w, p: T(64, 4, 2), query_tiles=lambda d, w: T(64, 4, 3), key_tiles=lambda d, w: T(64, 4, 1)),
}
def use(name):
    for n, v in {**DEFAULT, **VARIANTS[name]}.items(): setattr(config, n, v)

def inputs(B, T, HQ, H, D, path=True, gate=False, documents=False, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    r = lambda *s: torch.randn(*s, device="cuda", generator=g)
    b16 = lambda x: x.bfloat16().requires_grad_()
    q, k, v = b16(r(B, T, HQ, D)), b16(r(B, T, H, D)), b16(r(B, T, H, D))
    w = beta = lg = None
    if path:
        w = torch.nn.functional.normalize(r(B, T, H, D), dim=-1).bfloat16().requires_grad_()
        beta = (2 * torch.sigmoid(r(B, T, H))).clamp(max=2 - 2**-7).requires_grad_()
    if gate: lg = torch.nn.functional.logsigmoid(r(B, T, HQ) + 3).requires_grad_()
    return q, k, v, w, beta, lg

def call(x): return path_attention(*x, implementation="triton")
def both(x, do):
    leaves = [t for t in x if t is not None]
    return lambda: torch.autograd.grad(call(x), leaves, do)

# (variant, B, T, HQ, H, D, path, gate)
SHAPES = [
    (8, 2048, 16, 16, 128, True, False), (2, 8192, 16, 16, 128, True, False),
    (2, 8192, 16, 16, 128, True, True), (2, 8192, 16, 16, 128, False, True),
    (2, 8192, 16, 16, 64, True, False), (2, 8192, 32, 8, 128, True, False),
    (1, 32768, 16, 16, 128, True, False),
]
# accuracy: T, D, HQ, H, w, beta, gate, documents, factor
CASES = [
    (130, 64, 2, 2, "random", "random", False, False, 1.0),
    (2000, 128, 2, 2, "random", "random", True, True, 1.0),
    (2000, 64, 4, 1, "random", "random", True, True, 1.0),
    (4096, 64, 2, 2, "random", "high", False, False, 1.0),
    (4096, 64, 2, 2, "constant", "edge", False, False, 1.0),
    (4096, 128, 2, 2, "random", "random", False, False, 1e-8),
    (4096, 128, 2, 2, "constant", "edge", False, False, 1.0),
    (4096, 128, 2, 2, "constant", "edge", True, False, 1.0),
    (2000, 128, 2, 2, None, "random", True, True, 1.0),
    (1111, 96, 4, 2, "random", "random", False, False, 1.0),
]
def accuracy(case):
    T_, D, HQ, H, w, beta, gate, docs, factor = case
    x = make_inputs(T_, B=1, HQ=HQ, H=H, D=D, w=w, beta=beta, gate=gate, documents=docs, dtype=torch.bfloat16, device="cuda")
    if w is not None:
        n = (x.w.detach().float() ** 2).sum(-1)
        x = x._replace(beta=torch.minimum(x.beta.detach(), (2 - 2**-20) / n).clamp(max=2 - 2**-7).requires_grad_())
    g = torch.Generator().manual_seed(1)
    do = (torch.randn(1, T_, HQ, D, generator=g) * factor).bfloat16().cuda()
    torch.use_deterministic_algorithms(True, warn_only=True)
    one = run(partial(path_attention, implementation="triton"), x, do)
    two = run(partial(path_attention, implementation="triton"), x, do)
    torch.use_deterministic_algorithms(False)
    exact = run(partial(path_attention, implementation="torch"), x.leaves(torch.float64), do)
    same = all(torch.equal(one[n], two[n]) for n in one)
    errors = {n: relative_error(one[n], exact[n]) for n in one}
    limits = {"out": 3e-3, "dq": 6e-3, "dk": 6e-3, "dv": 6e-3}
    bad = [n for n, e in errors.items() if not e <= limits.get(n, 1e-2)]
    say(case, " ".join(f"{n}={e:.1e}" for n, e in errors.items()), "SAME" if same else "DIFFERENT BITS", "BAD " + ",".join(bad) if bad else "ok")

def warm(job):
    kind, item = job
    if kind == "case": accuracy(item)
    else:
        variant, (B, T_, HQ, H, D, path, gate) = item
        use(variant)
        x = inputs(1, 4096, HQ, H, D, path, gate)
        both(x, torch.randn_like(x[0]))(); torch.cuda.synchronize()

TIMED = [("default", s) for s in SHAPES] + [(v, SHAPES[1]) for v in VARIANTS if v != "default"] + [("stages", SHAPES[4]), ("regs", SHAPES[4])]
def unique():
    seen = {}
    for v, s in TIMED: seen.setdefault((v, s[2:]), ("time", (v, s)))
    return list(seen.values()) + [("case", c) for c in CASES]

def profile(variant, shape):
    use(variant)
    x = inputs(*shape); do = torch.randn_like(x[0]); f = both(x, do)
    for _ in range(3): f()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        for _ in range(5): f()
        torch.cuda.synchronize()
    rows = sorted(((e.key.replace("_kernel", ""), e.self_device_time_total / 5e3, e.count / 5) for e in p.key_averages() if e.self_device_time_total), key=lambda r: -r[1])
    say("kernels", variant, shape, "sum %.3f" % sum(r[1] for r in rows), "launches %g" % sum(r[2] for r in rows))
    print("    " + "; ".join(f"{n[:32]} {t:.3f}" + (f" ({c:g})" if c != 1 else "") for n, t, c in rows if t > 0.004), flush=True)

def flash(shape):
    B, T_, HQ, H, D, *_ = shape
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in inputs(B, T_, HQ, H, D)[:3])
    if H != HQ: k, v = (t.detach().repeat_interleave(HQ // H, 1).requires_grad_() for t in (k, v))
    do = torch.randn_like(q)
    from torch.nn.attention import SDPBackend, sdpa_kernel
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        c = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        with torch.no_grad(): a = do_bench(c, rep=REP, warmup=20, return_mode="median")
        b = do_bench(lambda: torch.autograd.grad(c(), [q, k, v], do), rep=REP, warmup=20, return_mode="median")
    return a, b

REP = 60
def timing(variant, shape, fa):
    use(variant)
    x = inputs(*shape); do = torch.randn_like(x[0])
    with torch.no_grad(): a = do_bench(lambda: call(x), rep=REP, warmup=20, return_mode="median")
    b = do_bench(both(x, do), rep=REP, warmup=20, return_mode="median")
    say(f"{variant:9s}", "B%d T%d %d/%d D%d path=%d gate=%d" % shape, "fwd %.3f  fwd+bwd %.3f" % (a, b), "  FA2 %.3f %.3f  ratio %.2f %.2f" % (*fa, a / fa[0], b / fa[1]) if fa else "")

if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "--warm":
        jobs = unique()
        warm(jobs[int(sys.argv[2])]); sys.exit()
    jobs = unique()
    say(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, len(jobs), "jobs")
    running, failed, order = [], 0, list(range(len(jobs)))
    while order or running:
        while order and len(running) < 15:
            i = order.pop(0)
            running.append((i, subprocess.Popen([sys.executable, __file__, "--warm", str(i)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
        for i, p in list(running):
            if p.poll() is not None:
                running.remove((i, p)); text = p.stdout.read()
                if jobs[i][0] == "case": print(text[-1500:] if p.returncode else text.strip(), flush=True)
                elif p.returncode: print(jobs[i], "FAILED", text[-1500:], flush=True)
        time.sleep(0.1)
    say("compiled and checked")
    fa = {}
    for s in (SHAPES[1], SHAPES[0]): profile("default", s)
    for v, s in TIMED:
        key = s[:5]
        try:
            if key not in fa: fa[key] = flash(s)
            timing(v, s, fa[key])
        except Exception as e: say(v, s, "FAILED", repr(e)[:300])
    for s in (SHAPES[2], SHAPES[4], SHAPES[5], SHAPES[3]): profile("default", s)
    for v in ("regs", "regs128", "small", "stages"): profile(v, SHAPES[1])
