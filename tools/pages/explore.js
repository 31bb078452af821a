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
  const found = SCHEDULES[[name, stages, microbatches, interleaved ? valueOf("chunks") : 1].join(" ")];
  if (typeof found === "string") return show(section, `Refused: ${found}.`, "");
  const whole = found.ranks[0].includes("W") ? 1 : 2; // how long B takes
  const ends = [];
  const bars = found.ranks.map((actions, rank) => {
    let now = 0;
    const drawn = actions.split(" ").map((word) => {
      if (word[0] === "-") {
        const x = 70 + 22 * now;
        now -= Number(word);
        return now > -word ? `<rect class="idle" x="${x}" y="${26 * rank}" width="${-22 * word - 1}" height="22"/>` : "";
      }
      const [microbatch, chunk] = word.slice(1).split(".");
      const width = word[0] === "B" ? whole : 1;
      const x = 70 + 22 * now;
      now += width;
      const fade = 1 - 0.25 * (chunk || 0);
      return `<rect class="${word[0]}" x="${x}" y="${26 * rank}" width="${22 * width - 1}" height="22" fill-opacity="${fade}"/>` +
        `<text class="on${chunk > 1 ? " pale" : ""}" x="${x + 11 * width}" y="${26 * rank + 15}">${microbatch}</text>`;
    });
    ends.push(now);
    return `<text x="0" y="${26 * rank + 15}">rank ${rank}</text>${drawn.join("")}`;
  });
  const end = 90 + 22 * Math.max(...ends);
  const stacks = found.inFlight.map((number, rank) =>
    [...Array(number)].map((_, i) => `<rect class="activations" x="${end + 9 * i}" y="${26 * rank + 4}" width="7" height="14"/>`).join(""));
  const width = end + 9 * Math.max(...found.inFlight);
  const idle = `${(100 * found.idle).toFixed(1)} % idle`;
  const flight = found.inFlight.join(", ");
  show(section, `${name}: ${idle}; in flight on ranks 0 to ${stages - 1}: ${flight}`, svg(width, 26 * stages, bars.join("") + stacks.join("")));
}

function drawMemory(section) {
  const chosen = Number(valueOf("stage"));
  const rows = MEMORY[`${valueOf("params")} ${valueOf("gpus")}`];
  const most = rows[0].slice(0, 3).reduce((a, b) => a + b);
  const bars = rows.map((row, stage) => {
    let x = 130;
    const drawn = ["parameters", "gradients", "optimizer"].map((part, i) => {
      const width = (560 * row[i]) / most;
      x += width;
      return `<rect class="${part}" x="${x - width}" y="${34 * stage}" width="${width}" height="26"/>`;
    });
    const sum = giga(row[0] + row[1] + row[2]);
    const name = stage ? `ZeRO-${stage}` : "DP";
    return `<g class="${stage === chosen ? "chosen" : "other"}"><text x="0" y="${34 * stage + 18}">${name}</text>` +
      `<text x="55" y="${34 * stage + 18}">${sum} GB</text>${drawn.join("")}</g>`;
  });
  const [parameters, gradients, optimizer, sent] = rows[chosen];
  const held = `${giga(parameters)} + ${giga(gradients)} + ${giga(optimizer)} GB`;
  const says = `A rank holds ${held} of parameters, gradients and optimizer, and sends ${giga(sent)} GB in a step.`;
  show(section, says, svg(690, 134, bars.join("")));
}

const giga = (bytes) => (bytes >= 999.5e9 ? (bytes / 1e9).toFixed(0) : String(Number((bytes / 1e9).toPrecision(3))));
const svg = (width, height, inside) =>
  `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" aria-label="The picture of what is said above">${inside}</svg>`;

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
  update();
}
