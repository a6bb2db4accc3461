"""The table of certified models: certificates that come with the package."""

from benchmarks.tables.markdown import Options, Results, markdown, percent
from vllm_kvretrieval.retrieval.certificates import Certificate, shipped


def certificates(_: Results, options: Options) -> str:
    """What each model loses by retrieval, and whether `certified` serves it so: a row per model."""
    header = ["model", "method", "contexts up to", "pass keys", "perplexity", "KL", "steps"]
    header += ["served by", "kernels, day"]
    return markdown(header, [_row(each) for each in shipped()]).rstrip("\n")


def _row(certificate: Certificate) -> list[str]:
    quality, steps = certificate.quality, certificate.steps
    found = sum(q.found for q in quality)
    kept = f"{found - sum(q.missed for q in quality)} of {found}"
    worst = max(q.perplexity / q.whole - 1 for q in quality)
    times = [each.ratio for each in steps]
    failed = certificate.failures()
    return [
        certificate.model,
        f"`{certificate.method}`, budget {certificate.options['budget']}",
        f"{certificate.longest:,}",
        f"{kept} (asked for {sum(q.keys for q in quality)})",
        f"{'+' if worst >= 0 else ''}{percent(worst, 2)}",
        f"{max(q.divergence for q in quality):.4f}",
        f"{min(times):.2f} to {max(times):.2f}",
        f"full attention: {'; '.join(failed)}" if failed else f"`{certificate.method}`",
        f"{certificate.facts['kernels']}, {certificate.date}",
    ]
