"""The first tables of the journal, as `makemigrations` writes them."""

from django.db import migrations, models
import django.db.models.deletion


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Entry",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("title", models.CharField(max_length=200)),
                ("text", models.TextField()),
                ("written", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "verbose_name_plural": "entries",
                "ordering": ["-written", "-pk"],
            },
        ),
        migrations.CreateModel(
            name="Comment",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=80)),
                ("text", models.TextField(max_length=2000)),
                ("written", models.DateTimeField(auto_now_add=True)),
                ("entry", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name="comments", to="journal.entry")),
            ],
            options={
                "ordering": ["written", "pk"],
            },
        ),
    ]
