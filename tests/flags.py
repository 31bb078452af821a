"""Values of flags, good and odd ones, which every lesson refuses."""

from tests.harness import ROOT

# Flag: good values; odd ones, which must be refused.
NO_INT = "0 -1 1.5 x 1000000000000 99999999999999999999999"
FLAGS = {
    "--layers": ("1 2 3 5", NO_INT), "--heads": ("1 2 4 12", NO_INT),
    "--width": ("12 24 48", NO_INT), "--context": ("4 12 24", NO_INT),
    "--vocab": ("256 257 300", f"{NO_INT} 255"), "--steps": ("1 2", NO_INT),
    "--batch": ("4 8 12 24", NO_INT), "--accum": ("1 2 3 4", NO_INT),
    "--optim": ("adamw sgd", "adam"),
    "--lr": ("0 0.001 0.01", "nan inf -1 x"), "--clip": ("0.1 1 inf", "nan 0 -1 x"),
    "--seed": ("0 7", "-1 1.5 x 99999999999999999999"),
    "--dtype": ("fp64 fp64 fp32", "fp16"),
    "--device": ("cpu auto", "cuda gpu"),
    "--data": (f"{ROOT}/LICENSE {ROOT}/docs/results", "nowhere /proc/self /dev/null"),
    "--save": ("{tmp}/x.pt", "/ {tmp} /no/such/x.pt /dev/null/x.pt"),
}  # fmt: skip
OWN = {
    "collectives": {"--megabytes": ("0.1 1", "-1 nan x")},
    "dp_async": {"--staleness": ("0 3", "-1 17 x"), "--slow": ("0=1 0=2.5", "9=4 1 0=0.5 0=x x=2 0=nan")},
    "ddp": {"--bucket-cap-mb": ("0 0.02 1", "-1 nan x")}, "zero3": {"--prefetch": ("0 1 7", "-1 8 x")},
    "hsdp": {"--shard": ("1 2", "0 -1 5 x"), "--prefetch": ("0 1 7", "-1 8 x")},
    "diloco": {"--inner-steps": ("1", NO_INT), "--outer-lr": ("1", "nan -1 x"),
               "--fragments": ("1", "0 -1 2 x"), "--delay": ("0", "-1 1 x")},
    "muon": {"--adjust-lr-fn": ("original match_rms_adamw", "adamw")},
    "offload": {"--link-gbps": ("1 inf", "0 -1 nan"), "--device-mb": ("50 inf", "-1 nan")},
    "context_parallel": {"--cp": ("1 2", "0 -1 5 x"), "--kind": ("ring ulysses", "all"),
                         "--order": ("zigzag contiguous", "x")},
    "expert_parallel": {"--experts": ("4 8", "0 -1 x"), "--top-k": ("1 2", "0 -1 99"),
                        "--ep": ("1 2", "0 -1 5"), "--capacity-factor": ("1.25 inf", "nan -1"),
                        "--balance": ("0 0.1 bias", "nan -1 x")},
    "pipeline": {"--schedule": ("naive gpipe 1f1b interleaved", "zb-h1")},
    "zero_bubble": {"--schedule": ("1f1b zb-h1 zb-h2", "gpipe")},
    "pipeline_v": {"--schedule": ("zb-v dualpipe-v", "zb-h1")},
    "parallel_3d": {"--tp": ("1 2", "0 -1 5 x"), "--pp": ("1 2", "0 -1 5 x"), "--zero": ("0 1", "-1 2")},
    "fusion": {"--plain": ("attention loss optimizer", "all")},
    "checkpointing": {"--policy": ("none full selective", "offload"), "--every": ("1 2", "0 -1 9 x")},
    "zero_r": {"--policy": ("partitioned offload", "full")},
    "survive": {"--timeout": ("1 10", "0 nan x"), "--min-workers": ("1 2", NO_INT)},
    "resume": {"--every": ("1 2", NO_INT), "--keep": ("1 2", "0"), "--checkpoint": ("{tmp}/c", "/dev/null")},
}  # fmt: skip
