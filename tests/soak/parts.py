"""All parts of the campaign."""

from soak.campaign import Part
from soak.crashes import Crashes
from soak.disks import Disks
from soak.files import Bombs, Files
from soak.kills import Kills, Ranks
from soak.long_runs import LongRuns
from soak.writers import Writers


def all_parts() -> list[Part]:
    return [Kills(), Ranks(), Writers(), Disks(), Files(), Bombs(), Crashes(), LongRuns()]
