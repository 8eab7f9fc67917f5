// main.js: every page, and the start.

import { registerPage, startApp } from "./app.js";
import { openOverview } from "./pages/overview.js";
import { openMetrics } from "./pages/metrics.js";
import { openStep } from "./pages/step.js";
import { openSamples } from "./pages/samples.js";
import { openGroup } from "./pages/group.js";
import { openTrajectory } from "./pages/trajectory.js";
import { openPrompt } from "./pages/prompt.js";
import { openCompare } from "./pages/compare.js";
import { openSearch } from "./pages/search.js";
import { openSql } from "./pages/sql.js";

registerPage("overview", openOverview);
registerPage("metrics", openMetrics);
registerPage("step", openStep);
registerPage("samples", openSamples);
registerPage("group", openGroup);
registerPage("t", openTrajectory);
registerPage("prompt", openPrompt);
registerPage("compare", openCompare);
registerPage("search", openSearch);
registerPage("sql", openSql);

startApp();
