// The questions of ten.html: a number of MB is right if it is near enough to what the docstring's formula says.
"use strict";

for (const form of document.querySelectorAll("form[data-answer]")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const { answer, within, formula } = form.dataset;
    const given = Number(form.querySelector("input").value.replace(/MB/i, "").trim().replace(",", "."));
    const ratio = given / answer;
    let says = `Too ${ratio < 1 ? "little" : "much"}. The docstring's formula: ${formula}.`;
    if (Math.abs(ratio - 1) <= within) says = `Right: ${formula} is ${Number(answer).toPrecision(3)} MB.`;
    else if (!(given > 0)) says = "A number, please.";
    form.querySelector("output").textContent = says;
  });
}
