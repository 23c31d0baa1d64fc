"""NVRx's straggler detector in a loop, as its guide has it: rank 1 is slow in one of two sections."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import straggler


class Trainer:
    def forward(self, rank):
        time.sleep(0.03 if rank == 1 else 0.01)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    straggler.Detector.initialize(
        scores_to_compute=["relative_perf_scores", "individual_perf_scores"],
        gather_on_rank0=True,
        report_time_interval=0.6,
        node_name="node-a",
    )
    trainer = Trainer()
    straggler.Detector.wrap_callables([straggler.CallableId(trainer, "forward")], profile_cuda=False)
    reports = []
    for _ in range(60):
        trainer.forward(rank)
        with straggler.Detector.detection_section("same everywhere", profile_cuda=True):
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1))
        report = straggler.Detector.generate_report_if_interval_elapsed()
        if report is not None:
            assert straggler.Detector.is_interval_elapsed()
            reports.append(report)
    found = [report.identify_stragglers(section_rel_threshold=0.7, section_indiv_threshold=0.2) for report in reports]
    told = {
        "reports": len(reports),
        "relative": sorted({name for one in found for name in one["straggler_sections_relative"]}),
        "who": sorted(
            {(i.rank, i.node) for one in found for ids in one["straggler_sections_relative"].values() for i in ids}
        ),
        "gpus": [len(one["straggler_gpus_relative"]) for one in found],
    }
    (Path(os.environ["TOLD"]) / f"stragglers-{rank}").write_text(json.dumps(told))
    straggler.Detector.shutdown()
    assert "forward" not in vars(trainer)
    if rank == 0:  # alone: the scores of one's own need nobody
        straggler.Detector.initialize(scores_to_compute=["individual_perf_scores"], gather_on_rank0=False)
        with straggler.Detector.detection_section("alone"):
            pass
        assert straggler.Detector.generate_report().section_individual_perf_scores == {"alone": {0: 1.0}}
        straggler.Detector.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
