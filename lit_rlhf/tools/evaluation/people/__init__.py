"""What people say about policies: who wins, how far they agree, and with which reward or judge."""

from lit_rlhf.tools.evaluation.people.check import (
    check_labelled_policies as check_labelled_policies,
)
from lit_rlhf.tools.evaluation.people.machines import PairScorer as PairScorer
from lit_rlhf.tools.evaluation.people.machines import judge_labels as judge_labels
from lit_rlhf.tools.evaluation.people.machines import score_label_pairs as score_label_pairs
from lit_rlhf.tools.evaluation.people.measure import People as People
from lit_rlhf.tools.evaluation.people.measure import measure_people as measure_people
from lit_rlhf.tools.evaluation.people.show import people_html as people_html
from lit_rlhf.tools.evaluation.people.show import print_people as print_people
