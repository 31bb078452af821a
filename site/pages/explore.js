// The explorers draw what explore-data.js says. A control is a select, or a slider over the words of data-values.
"use strict";

const valueOf = (id) => {
  const control = document.getElementById(id);
  return control.dataset.values ? control.dataset.values.split(" ")[control.value] : control.value;
};

function drawSchedule(section) {
  const [name, stages, microbatches] = ["schedule", "stages", "microbatches"].map(valueOf);
  const interleaved = name === "interleaved";
  document.getElementById("chunks").disabled = !interleaved;
  const chunks = interleaved ? Number(valueOf("chunks")) : 1;
  const found = SCHEDULES[[name, stages, microbatches, chunks].join(" ")];
  if (typeof found === "string") return show(section, `Refused: ${found}.`, "");
  const whole = found.ranks[0].includes("W") ? 1 : 2; // how long B takes
  const bars = found.ranks.map((actions) => {
    let now = 0;
    return actions.split(" ").map((word) => {
      const [microbatch, chunk] = word.slice(1).split(".");
      const length = word[0] === "-" ? -word : (word[0] === "B" ? whole : 1) / chunks;
      now += length;
      return { kind: word[0], microbatch, chunk: Number(chunk || 0), begin: now - length, length, end: now };
    });
  });
  const left = 64 + 4 * Math.max(...found.inFlight);
  const end = Math.max(...bars.map((row) => row.at(-1).end));
  const unit = Math.max(4, Math.min(22, (section.clientWidth - left) / end)); // pixels
  const drawn = bars.map((row, rank) => {
    const stack = [...Array(found.inFlight[rank])].map((_, i) => box("activations", 52 + 4 * i, 26 * rank + 4, 3, 14));
    const rects = row.map((bar) => {
      const [x, width] = [left + unit * bar.begin, unit * bar.length];
      if (bar.kind === "-") return bar.begin ? box("idle", x, 26 * rank, width - 1, 22) : ""; // but before the first
      const number = `<text class="on${bar.chunk > 1 ? " pale" : ""}" x="${x + width / 2}" y="${26 * rank + 15}">${bar.microbatch}</text>`;
      return box(bar.kind, x, 26 * rank, Math.max(width - 1, width / 2), 22, 1 - 0.25 * bar.chunk) + (width > 11 ? number : "");
    });
    return `<text x="0" y="${26 * rank + 15}">rank ${rank}</text>${stack.join("")}${rects.join("")}`;
  });
  const flight = `in flight on ranks 0 to ${stages - 1}${interleaved ? `, of 1/${chunks} of a rank's layers` : ""}: ${found.inFlight.join(", ")}`;
  const says = `${name}: ${(100 * found.idle).toFixed(1)} % idle; ${flight}`;
  show(section, says, svg(Math.floor(left + unit * end), 26 * stages, drawn.join("")));
}

function drawMemory(section) {
  const chosen = Number(valueOf("stage"));
  const rows = MEMORY[`${valueOf("params")} ${valueOf("gpus")}`];
  const most = rows[0].slice(0, 3).reduce((a, b) => a + b);
  const room = Math.min(560, section.clientWidth - 130);
  const bars = rows.map((row, stage) => {
    let x = 130;
    const drawn = ["parameters", "gradients", "optimizer"].map((part, i) => {
      const width = (room * row[i]) / most;
      x += width;
      return box(part, x - width, 34 * stage, width, 26);
    });
    const sum = giga(row[0] + row[1] + row[2]);
    const name = stage ? `ZeRO-${stage}` : "DP";
    return `<g class="${stage === chosen ? "chosen" : "other"}"><text x="0" y="${34 * stage + 18}">${name}</text>` +
      `<text x="55" y="${34 * stage + 18}">${sum} GB</text>${drawn.join("")}</g>`;
  });
  const [parameters, gradients, optimizer, sent] = rows[chosen];
  const held = `${giga(parameters)} + ${giga(gradients)} + ${giga(optimizer)} GB`;
  const says = `A rank holds ${held} of parameters, gradients and optimizer, and sends ${giga(sent)} GB in a step.`;
  show(section, says, svg(130 + room, 134, bars.join("")));
}

const giga = (bytes) => (bytes >= 999.5e9 ? (bytes / 1e9).toFixed(0) : String(Number((bytes / 1e9).toPrecision(3))));
const svg = (width, height, inside) =>
  `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" aria-label="The picture of what is said above">${inside}</svg>`;

const box = (kind, x, y, width, height, opacity = 1) =>
  `<rect class="${kind}" x="${x}" y="${y}" width="${width}" height="${height}" fill-opacity="${opacity}"/>`;

function show(section, says, drawing) {
  section.querySelector(".says").textContent = says;
  section.querySelector(".drawing").innerHTML = drawing;
}

for (const [id, draw] of [["schedules", drawSchedule], ["memory", drawMemory]]) {
  const section = document.getElementById(id);
  const update = () => {
    for (const shown of section.querySelectorAll("label b")) {
      const id = shown.parentElement.htmlFor;
      shown.textContent = valueOf(id);
      document.getElementById(id).setAttribute("aria-valuetext", valueOf(id));
    }
    draw(section);
  };
  section.addEventListener("input", update);
  addEventListener("pageshow", update); // at first, and when a browser brings back what was chosen
  addEventListener("resize", update);
}
