"""How much memory a process took beyond what stood before. Needs nothing: peers' interpreters run it too."""

from pathlib import Path


class PeakMemory:
    """Megabytes of resident memory since `start`, of this process."""

    def __init__(self):
        self.before = self.standing = 0.0

    def start(self):
        """What stands now is what later peaks are measured from; the kernel's high-water mark begins anew."""
        self.before = status("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")
        self.standing = status("VmRSS")

    def metrics(self):
        """What stood, the peak above it, and the most that the process ever had."""
        peak = status("VmHWM")
        return {
            "standing_mb": round(self.standing, 1),
            "above_mb": round(peak - self.standing, 1),
            "total_mb": round(max(peak, self.before), 1),
        }


def status(field):
    """A field of ``/proc/self/status``, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))
