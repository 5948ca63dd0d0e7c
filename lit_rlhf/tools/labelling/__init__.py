"""A page on which people compare two responses, and the file that keeps their choices.

`comparisons` makes pairs of responses, `selection` orders them, `store` keeps labels on disk,
`schedule` decides what an annotator sees next, and `page` is the web application.
"""

from lit_rlhf.tools.labelling.comparisons import pair_responses as pair_responses
from lit_rlhf.tools.labelling.page import BODY_SECONDS as BODY_SECONDS
from lit_rlhf.tools.labelling.page import PageOptions as PageOptions
from lit_rlhf.tools.labelling.page import build_app as build_app
from lit_rlhf.tools.labelling.schedule import Schedule as Schedule
from lit_rlhf.tools.labelling.schedule import ScheduleOptions as ScheduleOptions
from lit_rlhf.tools.labelling.selection import order_comparisons as order_comparisons
from lit_rlhf.tools.labelling.store import LabelStore as LabelStore
